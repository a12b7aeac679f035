#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

#include "capture.h"
#include "clock.h"
#include "guard.h"
#include "races.h"

namespace sim {
namespace {

constexpr size_t kArena = size_t{1} << 36;     // addresses, not memory
constexpr size_t kGranule = 512;               // as CUDA's allocator
constexpr size_t kReturned = size_t{1} << 26;  // what is freed and as large as this goes back to the system

struct Device {
  char* pointers = nullptr;                              // of tensors
  char* kernels = nullptr;                               // the same bytes
  size_t used = 0;                                       // addresses
  std::unordered_map<size_t, std::vector<char*>> freed;  // by size
  size_t limit = size_t{8} << 30;
  int64_t fail_after = -1;
  c10::CachingDeviceAllocator::DeviceStats stats;  // what graphs keep counts as reserved
};

pid_t owner = 0;
Device devices[kDevices];
std::unordered_map<char*, size_t> sizes;  // of what is in use
std::set<char*> kept;                     // freed, but a graph uses it
std::map<const char*, size_t> pinned;
struct sigaction previous;

constexpr size_t kAll = 0;  // StatType::AGGREGATE

void on_fault(int signal, siginfo_t* info, void* context) {
  const int device = device_of(info->si_addr);
  if (device >= 0) {
    char text[] = "The host touches memory of device sim:0\n";
    text[sizeof(text) - 3] = static_cast<char>('0' + device);
    [[maybe_unused]] const auto written = write(2, text, sizeof(text) - 1);
  }
  const bool detailed = previous.sa_flags & SA_SIGINFO;
  if (detailed && previous.sa_sigaction) {
    previous.sa_sigaction(signal, info, context);
  } else if (!detailed && previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(signal);
  } else {
    sigaction(signal, &previous, nullptr);  // the same fault ends the process
  }
}

void start() {
  if (owner == getpid()) return;
  TORCH_CHECK(owner == 0, "a simulated device cannot be used in a forked process");
  for (Device& device : devices) {
    const int file = memfd_create("simulated device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "no memory for a simulated device: ", strerror(errno));
    void* pointers = mmap(nullptr, kArena, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* kernels = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    TORCH_CHECK(pointers != MAP_FAILED && kernels != MAP_FAILED, "no addresses for a simulated device");
    device.pointers = static_cast<char*>(pointers);
    device.kernels = static_cast<char*>(kernels);
  }
  owner = getpid();
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous);
}

void poison(char* pointer, size_t bytes) { memset(for_kernels(pointer), kPoison, bytes); }

[[noreturn]] void out_of_memory(Device& device, int index, size_t bytes) {
  ++device.stats.num_ooms;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "Simulated device out of memory. Tried to allocate ", bytes,
                   " bytes. sim:", index, " has a limit of ", device.limit, " bytes, of which ",
                   device.stats.reserved_bytes[kAll].current, " are in use.");
}

void release(void* pointer);

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Stream stream = current_stream(current_device());
    const int index = stream.device_index();
    const c10::Device on(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
    if (bytes == 0) return {nullptr, nullptr, &release, on};
    if (on_launch) on_launch("an allocation");
    const size_t size = (bytes + kGranule - 1) / kGranule * kGranule;
    char* pointer = nullptr;
    {
      std::lock_guard<std::mutex> guard(lock());
      start();
      Device& device = devices[index];
      auto& stats = device.stats;
      const bool planted = device.fail_after == 0;
      if (device.fail_after >= 0) --device.fail_after;
      if (planted || stats.reserved_bytes[kAll].current + size > device.limit) out_of_memory(device, index, bytes);
      auto& same = device.freed[size];
      if (same.empty()) {
        TORCH_CHECK(device.used + size <= kArena, "no addresses left on a simulated device");
        pointer = device.pointers + device.used;
        device.used += size;
      } else {
        pointer = same.back();
        same.pop_back();
      }
      sizes[pointer] = size;
      stats.allocation[kAll].increase(1);
      for (auto* counted : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
        (*counted)[kAll].increase(size);
      }
      Access access = launch(number(stream), "an allocation");
      const auto address = reinterpret_cast<uintptr_t>(pointer);
      if (Capture* capture = capturing(number(stream))) {
        capture->memory.insert(address);
        block_made(address, bytes, index, Access{access.stream, 0, access.launch, access.name, access.where});
        touch(capture, {{{{address, address + bytes}}, true}}, access);
      } else {
        block_made(address, bytes, index, access);
      }
    }
    poison(pointer, size);
    return {pointer, pointer, &release, on};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    memcpy(for_kernels(to), for_kernels(from), bytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> guard(lock());
    block_recorded(reinterpret_cast<uintptr_t>(data.get()), number(stream));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock());
    return devices[device].stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock());
    auto& stats = devices[device].stats;
    for (auto* counted : {&stats.allocation, &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*counted)[kAll].reset_peak();
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock());
    return {devices[device].limit - devices[device].stats.reserved_bytes[kAll].current, devices[device].limit};
  }
};

void give_back(char* pointer) {
  const int index = device_of(pointer);
  const size_t size = [&] {
    std::lock_guard<std::mutex> guard(lock());
    return sizes.at(pointer);
  }();
  poison(pointer, size);
  if (size >= kReturned) madvise(for_kernels(pointer), size, MADV_REMOVE);
  std::lock_guard<std::mutex> guard(lock());
  sizes.erase(pointer);
  devices[index].freed[size].push_back(pointer);
  devices[index].stats.reserved_bytes[kAll].decrease(size);
  block_freed(reinterpret_cast<uintptr_t>(pointer));
}

void release(void* data) {
  auto* pointer = static_cast<char*>(data);
  if (!pointer || owner != getpid()) return;
  bool graph;
  {
    std::lock_guard<std::mutex> guard(lock());
    auto& stats = devices[device_of(pointer)].stats;
    const size_t size = sizes.at(pointer);
    stats.allocation[kAll].decrease(1);
    for (auto* counted : {&stats.allocated_bytes, &stats.active_bytes}) (*counted)[kAll].decrease(size);
    graph = kept_by_graph(reinterpret_cast<uintptr_t>(pointer));
    if (graph) kept.insert(pointer);
  }
  if (!graph) give_back(pointer);
}

void release_pinned(void* data) {
  {
    std::lock_guard<std::mutex> guard(lock());
    pinned.erase(static_cast<char*>(data));
    block_freed(reinterpret_cast<uintptr_t>(data));
  }
  free(data);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    if (data) {
      memset(data, kPoison, bytes);
      std::lock_guard<std::mutex> guard(lock());
      pinned[static_cast<char*>(data)] = bytes;
      block_made(reinterpret_cast<uintptr_t>(data), bytes, -1, Access{0, 0, launches(), "an allocation"});
    }
    return {data, data, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies keep what they use
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &the_device_allocator);
REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, &the_pinned_allocator);

}  // namespace

c10::DeviceAllocator* device_allocator() { return &the_device_allocator; }
c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

int device_of(const void* pointer) {
  for (int index = 0; index < kDevices; ++index) {
    const char* first = devices[index].pointers;
    if (first && pointer >= first && pointer < first + kArena) return index;
  }
  return -1;
}

void* for_kernels(const void* pointer) {
  const int device = device_of(pointer);
  if (device < 0) return const_cast<void*>(pointer);
  return devices[device].kernels + (static_cast<const char*>(pointer) - devices[device].pointers);
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(lock());
  const auto after = pinned.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned.begin()) return false;
  const auto& [first, bytes] = *std::prev(after);
  return pointer < first + bytes;
}

void set_limit(int device, size_t bytes) {
  std::lock_guard<std::mutex> guard(lock());
  devices[device].limit = bytes;
}

void fail_after(int device, int64_t allocations) {
  std::lock_guard<std::mutex> guard(lock());
  devices[device].fail_after = allocations;
}

void poison(uintptr_t address) {
  auto* pointer = reinterpret_cast<char*>(address);
  size_t size;
  {
    std::lock_guard<std::mutex> guard(lock());
    size = sizes.at(pointer);
  }
  poison(pointer, size);
}

void release_kept(uintptr_t address) {
  auto* pointer = reinterpret_cast<char*>(address);
  {
    std::lock_guard<std::mutex> guard(lock());
    if (!kept.erase(pointer)) return;  // still in use
  }
  give_back(pointer);
}

}  // namespace sim
