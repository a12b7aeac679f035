// Collectives of torch.distributed on the devices' tensors: gloo moves the bytes, on a stream of the group's own.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "capture.h"
#include "clock.h"
#include "guard.h"
#include "tensors.h"

namespace sim {
namespace {

using c10::IValue;

// As NCCL's: `wait` lets the current stream wait, not the host, and tensors are kept until then.
class Work final : public c10d::Work {
 public:
  Work(int stream, int device, std::vector<at::Tensor> kept)
      : stream_(stream), device_(device), kept_(std::move(kept)) {
    std::lock_guard<std::mutex> guard(lock());
    ended_ = now(stream);
  }

  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }

  void synchronize() override {
    {
      std::lock_guard<std::mutex> guard(lock());
      join(now(number(current_stream(device_))), ended_);
    }
    kept_.clear();
  }

  bool isCompleted() override { return query(ended_, asked_, stream_); }
  bool isSuccess() const override { return true; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device_))});
    const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, future->devices()[0], stream_ % kStreams));
    future->markCompleted(IValue(kept_));  // its events are recorded on the group's stream
    return future;
  }

 private:
  int stream_, device_, asked_ = 0;
  Clock ended_;
  std::vector<at::Tensor> kept_;
};

int stream_of(const void* group, int device) {
  static std::map<std::pair<const void*, int>, int> streams;
  static std::mutex mutex;
  std::lock_guard<std::mutex> guard(mutex);
  const auto [found, fresh] = streams.try_emplace({group, device}, 0);
  if (fresh) {
    const c10::impl::VirtualGuardImpl devices(c10::DeviceType::PrivateUse1);
    const c10::Device on(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
    found->second = number(devices.getNewStream(on));
  }
  return found->second;
}

struct Arguments {
  std::vector<Touched> touched;
  std::vector<at::Tensor> tensors;
  int device = -1;

  IValue take(const IValue& value, bool write) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!on_device(tensor)) return value;
      device = tensor.device().index();
      tensors.push_back(tensor);
      touched.push_back({ranges_of(tensor), write});
      return host_view(tensor);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(take(IValue(tensor), write).toTensor());
      return list;
    }
    if (value.isList()) {  // of lists
      c10::List<c10::List<at::Tensor>> lists;
      for (const IValue& list : value.toListRef()) {
        if (!list.isTensorList()) return value;
        lists.push_back(take(list, write).toTensorList());
      }
      return lists;
    }
    return value;
  }
};

void collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::vector<IValue> given(stack->end() - static_cast<int64_t>(count), stack->end());
  if (on_launch) on_launch(schema.name().c_str());
  Arguments arguments;
  torch::jit::Stack on_cpu;
  const void* group = nullptr;
  for (size_t i = 0; i < count; ++i) {
    const std::string& name = schema.arguments()[i].name();
    on_cpu.push_back(arguments.take(given[i], name.find("input") == std::string::npos));
    if (name == "process_group") group = given[i].toCustomClass<c10d::ProcessGroup>().get();
  }
  const int current = number(current_stream(arguments.device));
  const int own = stream_of(group, arguments.device);
  {
    std::lock_guard<std::mutex> guard(lock());
    TORCH_CHECK(!capturing(current), "collectives of a simulated device cannot be captured");
    join(now(own), now(current));
    touch(nullptr, arguments.touched, launch(own, intern(schema.name())));
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &on_cpu);
  on_cpu.back().toCustomClass<c10d::Work>()->wait();  // for the other ranks, which a device would do by itself
  torch::jit::drop(*stack, count);
  if (on_cpu.size() > 1) stack->push_back(given[0]);
  stack->push_back(IValue(c10::static_intrusive_pointer_cast<c10d::Work>(
      c10::make_intrusive<Work>(own, arguments.device, std::move(arguments.tensors)))));
}

}  // namespace

TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {
  for (const char* name : {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_",
                           "_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
                           "_reduce_scatter_base_", "alltoall_base_", "gather_", "scatter_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&collective>());
  }
}

}  // namespace sim
