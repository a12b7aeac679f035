#include "capture.h"

#if __has_include(<ATen/core/GraphImplInterface.h>)
#define SIM_HAS_GRAPHS
#include <ATen/core/GraphImplInterface.h>
#endif
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <memory>

#include "guard.h"
#include "memory.h"

namespace sim {
namespace {

std::map<uint64_t, Capture*> running;
std::map<uint64_t, Capture*> living;  // the running ones and those of graphs
uint64_t captures = 0;

// An error on a capturing stream breaks the capture, too: it ends with an error.
[[noreturn]] void refuse(Capture& capture, const char* why) {
  capture.broken = why;
  TORCH_CHECK(false, "capture of a graph on a simulated device: ", why);
}

}  // namespace

void refuse_in_capture(const char* what, int stream) {
  std::lock_guard<std::mutex> guard(lock());
  for (const auto& [id, capture] : running) {
    const bool other_thread = capture->only_own_thread && capture->thread != std::this_thread::get_id();
    const bool captured = stream < 0 || capture->streams.count(stream);
    if (captured || !(other_thread || capture->relaxed)) {
      refuse(*capture, intern(std::string("the host waits meanwhile: ") + what));
    }
  }
}

void remember(Capture& capture, const at::Tensor& tensor, const at::Tensor& view) {
  if (tensor.numel() == 0) return;
  const auto address = reinterpret_cast<uintptr_t>(tensor.storage().data_ptr().get());
  at::Tensor value = view.clone();
  std::lock_guard<std::mutex> guard(lock());
  if (!capture.memory.count(address)) capture.before.push_back({address, block_owner(address), view, std::move(value)});
}

void refuse_captured(const Event& event) {
  TORCH_CHECK(event.capture == 0, "the host asks for an event that was recorded while a graph was captured");
}

Capture* capturing(int stream) {
  for (const auto& [id, capture] : running) {
    if (capture->streams.count(stream)) return capture;
  }
  return nullptr;
}

uint64_t capture_of(int stream) {
  const Capture* capture = capturing(stream);
  return capture ? capture->id : 0;
}

void capture_wait(int stream, const Event& event) {
  Capture* capture = capturing(stream);
  if (capture) {
    if (event.capture != capture->id)
      refuse(*capture, "isolation: a captured stream waits for work that is not captured");
  } else if (event.capture) {
    const auto found = running.find(event.capture);
    TORCH_CHECK(found != running.end(), "a stream waits for an event of a capture that has ended");
    if (stream % kStreams == 0) refuse(*found->second, "the default stream waits for captured work");
    found->second->streams.insert(stream);  // a fork
  }
}

void touch(Capture* capture, const std::vector<Touched>& touched, const Access& access) {
  for (const Touched& one : touched) {
    if (capture) {
      touch(capture->histories, one.ranges, one.write, access);
    } else {
      touch(one.ranges, one.write, access);
    }
  }
}

void record(Capture& capture, const char* name, std::vector<Touched> touched, Body body) {
  std::vector<std::pair<uintptr_t, uint64_t>> owners;
  for (const Touched& one : touched) {
    if (!one.ranges.empty()) owners.emplace_back(one.ranges[0].begin, block_owner(one.ranges[0].begin));
  }
  capture.launches.push_back({name, std::move(touched), std::move(owners), std::move(body)});
}

bool kept_by_graph(uintptr_t address) {
  for (const auto& [id, capture] : living) {
    if (capture->memory.count(address)) return true;
  }
  return false;
}

#ifdef SIM_HAS_GRAPHS
namespace {

class Graph final : public at::GraphImplInterface {
 public:
  explicit Graph(const at::GraphImplArgs&) {}
  ~Graph() override { reset(); }

  void capture_begin(c10::MempoolId_t, at::GraphCaptureMode mode) override {
    TORCH_CHECK(!capture_, "this graph has been captured already");
    const int stream = number(current_stream(current_device()));
    TORCH_CHECK(stream % kStreams, "graphs must be captured on another stream than the default one");
    std::lock_guard<std::mutex> guard(lock());
    TORCH_CHECK(!capturing(stream), "this stream is being captured already");
    capture_ = std::make_unique<Capture>();
    capture_->id = ++captures;
    capture_->origin = stream;
    capture_->only_own_thread = mode == at::GraphCaptureMode::ThreadLocal;
    capture_->relaxed = mode == at::GraphCaptureMode::Relaxed;
    capture_->thread = std::this_thread::get_id();
    capture_->streams = {stream};
    for (int device = 0; device < kDevices; ++device) {
      capture_->random.push_back(inner_generator(default_generator(device)).get_state());
    }
    running[capture_->id] = living[capture_->id] = capture_.get();
  }

  void capture_end() override {
    {
      std::lock_guard<std::mutex> guard(lock());
      TORCH_CHECK(capture_ && running.erase(capture_->id), "no capture to end");
    }
    take_back();
    std::lock_guard<std::mutex> guard(lock());
    TORCH_CHECK(!capture_->broken,
                "capture of a graph on a simulated device: it was broken before: ", capture_->broken);
    TORCH_CHECK(number(current_stream(current_device())) == capture_->origin,
                "a capture ends on the stream that began it");
    const Clock& known = now(capture_->origin);
    for (const int stream : capture_->streams) {
      TORCH_CHECK(covers(known, stream, now(stream)[stream]),
                  "unjoined: the stream that began the capture does not wait for stream ", stream % kStreams, " of it");
    }
  }

  void instantiate() override {}

  void replay() override {
    TORCH_CHECK(capture_ && !running.count(capture_->id), "no graph to replay");
    const int stream = number(current_stream(current_device()));
    for (const Recorded& one : capture_->launches) {
      Access access;
      Clock known;
      {
        std::lock_guard<std::mutex> guard(lock());
        TORCH_CHECK(!capturing(stream), "a graph cannot be replayed in a capture");
        access = launch(stream, one.name);
        for (const auto& [address, owner] : one.owners) {
          if (block_owner(address) == owner || kept_by_graph(address)) continue;
          report("capture", describe(access) + " is replayed on memory that was freed after the capture");
        }
        touch(nullptr, one.touched, access);
        known = now(stream);
      }
      one.body(access, known);
    }
  }

  void reset() override {
    std::set<uintptr_t> memory;
    {
      std::lock_guard<std::mutex> guard(lock());
      if (!capture_) return;
      running.erase(capture_->id);
      living.erase(capture_->id);
      memory = std::move(capture_->memory);
      capture_.reset();
    }
    for (const uintptr_t address : memory) release_kept(address);
  }

  c10::MempoolId_t pool() const override { return {capture_ ? capture_->id : 0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  void take_back() {
    const at::AutoDispatchBelowADInplaceOrView below;
    for (auto one = capture_->before.rbegin(); one != capture_->before.rend(); ++one) {
      const bool lives = [&] {
        std::lock_guard<std::mutex> guard(lock());
        return block_owner(one->address) == one->owner;
      }();
      if (lives && one->view.sizes() == one->value.sizes()) one->view.copy_(one->value);
    }
    capture_->before.clear();
    for (const uintptr_t address : capture_->memory) poison(address);
    for (int device = 0; device < kDevices; ++device) {
      at::Generator generator = inner_generator(default_generator(device));
      generator.set_state(capture_->random[device]);
    }
  }

  std::unique_ptr<Capture> capture_;
};

using at::GraphImplRegistry, at::RegistererGraphImplRegistry;  // the macro's names
REGISTER_GRAPH_IMPL(SIM, Graph);

}  // namespace
#endif

}  // namespace sim
