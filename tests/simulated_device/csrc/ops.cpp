// Every op without a kernel of the device's own runs the CPU's on the same bytes, as one launch on the current stream.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_set>

#include "capture.h"
#include "guard.h"
#include "memory.h"
#include "tensors.h"

namespace sim {
namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

// The size of what they return depends on values: a device's host has to wait for them.
const std::unordered_set<std::string> kReadBack = {"aten::nonzero",
                                                   "aten::masked_select",
                                                   "aten::_unique",
                                                   "aten::_unique2",
                                                   "aten::unique_dim",
                                                   "aten::equal",
                                                   "aten::unique_consecutive",
                                                   "aten::unique_dim_consecutive",
                                                   "aten::bincount",
                                                   "aten::is_nonzero"};
const std::unordered_set<std::string> kIndexing = {"aten::index",         "aten::index_put",
                                                   "aten::index_put_",    "aten::_index_put_impl_",
                                                   "aten::_unsafe_index", "aten::_unsafe_index_put"};

// One tensor of the device among the arguments, and what the CPU gets in its place.
struct Taken {
  at::Tensor tensor, view;
  bool write;
};

struct Launch {
  explicit Launch(const c10::OperatorHandle& op) : op(op) {}

  const c10::OperatorHandle& op;
  std::vector<Taken> taken;
  int device = -1;
  Capture* capture = nullptr;
  std::vector<Touched> touched;
  std::vector<at::Tensor> fresh;  // results that are no arguments, for kernels
  int of_host = 0;                // tensors of the host among the arguments; numbers do not count

  void on(int index) {
    TORCH_CHECK(device < 0 || device == index, "Expected all tensors to be on the same device, but found sim:", device,
                " and sim:", index, " in ", op.schema().name());
    device = index;
  }

  at::Tensor take(const at::Tensor& tensor, bool write) {
    if (!on_device(tensor)) {
      of_host += tensor.defined() && tensor.dim() > 0;
      return tensor;
    }
    on(tensor.device().index());
    for (const Taken& before : taken) {  // aliases of one tensor stay one
      if (before.tensor.is_same(tensor) && before.write == write) return before.view;
    }
    taken.push_back({tensor, host_view(tensor), write});
    return taken.back().view;
  }

  IValue take(const IValue& value, bool write) {
    if (value.isTensor()) return take(value.toTensor(), write);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(take(tensor, write));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional<at::Tensor>(take(*tensor, write)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) {
      on(value.toDevice().has_index() ? value.toDevice().index() : current_device());
      return c10::Device(c10::kCPU);
    }
    if (value.isGenerator() && value.toGenerator().device().type() == c10::DeviceType::PrivateUse1) {
      return inner_generator(value.toGenerator());
    }
    return value;
  }

  // A result of the CPU's kernel, on the device.
  at::Tensor give(const at::Tensor& result, const Access& access) {
    if (!result.defined()) return result;
    for (const Taken& one : taken) {
      if (result.is_same(one.view)) return one.tensor;
      if (result.storage().is_alias_of(one.view.storage())) {
        return at::native::as_strided_tensorimpl(one.tensor, result.sizes(), result.strides(), result.storage_offset());
      }
    }
    at::Tensor made = empty_on(device, result.sizes(), result.strides(), result.scalar_type());
    fresh.push_back(host_view(made));
    fresh.back().copy_(result);
    std::lock_guard<std::mutex> guard(lock());
    const uint64_t time = now(access.stream)[access.stream];  // after the allocation
    touched.push_back({ranges_of(made), true});
    touch(capturing(access.stream), {touched.back()},
          Access{access.stream, time, access.launch, access.name, access.where});
    return made;
  }

  IValue give(const IValue& value, const Access& access) {
    if (value.isTensor()) return give(value.toTensor(), access);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(give(tensor, access));
      return list;
    }
    return value;
  }

  // What the kernel did to shapes and sizes of its out= arguments.
  void resized() {
    for (const Taken& one : taken) {
      if (!one.write) continue;
      auto* impl = one.tensor.unsafeGetTensorImpl();
      const c10::Storage& storage = one.view.storage();
      const void* data = one.tensor.storage().data_ptr().get();
      if (storage.data() != (data ? for_kernels(data) : nullptr)) {
        grow(one.tensor, storage.nbytes());
        memcpy(for_kernels(one.tensor.storage().data_ptr().get()), storage.data(), storage.nbytes());
      }
      if (one.view.sizes() != one.tensor.sizes() || one.view.strides() != one.tensor.strides()) {
        impl->set_sizes_and_strides(one.view.sizes(), one.view.strides());
      }
    }
  }

  Access begin(int stream, const char* name) {
    for (const Taken& one : taken) touched.push_back({ranges_of(one.tensor), one.write});
    std::lock_guard<std::mutex> guard(lock());
    const Access access = launch(stream, name);
    capture = capturing(stream);
    touch(capture, touched, access);
    return access;
  }
};

Clock known(int stream) {
  std::lock_guard<std::mutex> guard(lock());
  return now(stream);
}

std::mutex& random_lock() {
  static std::mutex mutex;
  return mutex;
}

// Runs the CPU's kernel. What draws numbers without a generator among its arguments draws the device's all the same.
void call(const c10::OperatorHandle& kernel, bool random, int device, Stack* stack) {
  constexpr c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  if (!random) return kernel.redispatchBoxed(cpu, stack);
  std::lock_guard<std::mutex> guard(random_lock());
  at::Generator host = at::detail::getDefaultCPUGenerator(), ours = inner_generator(default_generator(device));
  const at::Tensor state = host.get_state();
  host.set_state(ours.get_state());
  try {
    kernel.redispatchBoxed(cpu, stack);
  } catch (...) {
    host.set_state(state);
    throw;
  }
  ours.set_state(host.get_state());
  host.set_state(state);
}

std::vector<at::Tensor> tensors_in(const Stack& stack) {
  std::vector<at::Tensor> tensors;
  for (const IValue& value : stack) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    if (value.isTensorList()) tensors.insert(tensors.end(), value.toTensorList().begin(), value.toTensorList().end());
  }
  return tensors;
}

// The launch as a graph replays it: the same kernel on the same addresses, its new results where they were.
Body replayed(const c10::OperatorHandle& kernel, bool random, int device, const Stack& arguments, const Stack& results,
              const std::vector<Taken>& taken, std::vector<at::Tensor> fresh) {
  std::vector<int> places;  // of the fresh ones among all results
  const auto all = tensors_in(results);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto aliases = [&](const Taken& one) {
      return all[i].defined() && all[i].storage().is_alias_of(one.view.storage());
    };
    if (all[i].defined() && std::none_of(taken.begin(), taken.end(), aliases)) places.push_back(static_cast<int>(i));
  }
  return [=](const Access&, const Clock&) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    Stack stack = arguments;
    call(kernel, random, device, &stack);
    const auto made = tensors_in(stack);
    for (size_t i = 0; i < fresh.size(); ++i) fresh[i].copy_(made[places[i]]);
  };
}

// Puts the results of a kernel on the stack in the place of its arguments; what aliases a written argument is that one.
void give(Launch& launch, const Access& access, const c10::FunctionSchema& schema, const Stack& results, Stack* stack) {
  const std::vector<IValue> arguments(stack->end() - static_cast<int64_t>(schema.arguments().size()), stack->end());
  torch::jit::drop(*stack, arguments.size());
  for (size_t i = 0; i < results.size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    size_t same = arguments.size();
    for (size_t j = 0; alias && alias->isWrite() && j < same; ++j) {
      const auto* of_argument = schema.arguments()[j].alias_info();
      if (of_argument && *of_argument == *alias) same = j;
    }
    stack->push_back(same < arguments.size() ? arguments[same] : launch.give(results[i], access));
  }
}

// Whether the size of the results, or an index, must come back to the host first.
bool reads_back(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments, int of_host) {
  if (!kIndexing.count(schema.name())) return kReadBack.count(schema.name());
  if (of_host) return true;
  // A mask becomes a list of places. index.Tensor has asked `nonzero` for it already; one number fills by the mask.
  if (schema.overload_name() == "Tensor_out" || (arguments.size() > 2 && arguments[2].toTensor().numel() == 1))
    return false;
  for (const auto& index : arguments[1].toOptionalTensorVector()) {
    if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte))
      return true;
  }
  return false;
}

void run(const c10::OperatorHandle& op, const c10::OperatorHandle& kernel, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto& schema = kernel.schema();
  const size_t count = schema.arguments().size();
  const char* name = intern(op.schema().name());
  if (on_launch) on_launch(name);

  Launch one(op);
  const std::vector<IValue> arguments(stack->end() - static_cast<int64_t>(count), stack->end());
  Stack on_cpu;
  IValue* generator = nullptr;
  on_cpu.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const auto& argument = schema.arguments()[i];
    on_cpu.push_back(one.take(arguments[i], argument.alias_info() && argument.alias_info()->isWrite()));
    if (argument.name() == "generator") generator = &on_cpu.back();
  }
  if (one.device < 0) one.on(current_device());
  TORCH_CHECK(one.of_host == 0 || kIndexing.count(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, sim:", one.device,
              " and cpu, in ", schema.name());
  if (generator && generator->isNone()) *generator = inner_generator(default_generator(one.device));

  const int stream = number(current_stream(one.device));
  const Access access = one.begin(stream, name);
  if (reads_back(schema, arguments, one.of_host)) wait(known(stream), name, stream);
  const bool random = !generator && op.hasTag(at::Tag::nondeterministic_seeded);
  const Stack recorded = on_cpu;
  if (one.capture) {
    for (const Taken& taken : one.taken) {
      if (taken.write) remember(*one.capture, taken.tensor, taken.view);
    }
  }
  call(kernel, random, one.device, &on_cpu);
  one.resized();
  give(one, access, schema, on_cpu, stack);
  if (!one.capture) return;
  Body body = replayed(kernel, random, one.device, recorded, on_cpu, one.taken, one.fresh);
  std::lock_guard<std::mutex> guard(lock());
  record(*one.capture, name, one.touched, std::move(body));
}

void fallback(const c10::OperatorHandle& op, Stack* stack) { run(op, op, stack); }

c10::OperatorHandle named(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

void as_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { run(op, op, stack); }

void convolution(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  run(op, named("aten::convolution"), stack);
}

void convolution_backward(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const at::Tensor grad = (*stack)[stack->size() - count].toTensor();
  const bool transposed = (*stack)[stack->size() - 4].toBool();
  const at::Tensor weight = (*stack)[stack->size() - count + 2].toTensor();
  const int64_t groups = (*stack)[stack->size() - 2].toInt();
  const int64_t outputs = transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(stack->end() - static_cast<int64_t>(count) + 3, IValue(c10::List<int64_t>({outputs})));
  run(op, named("aten::convolution_backward"), stack);
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::Device on = device.value_or(c10::Device(c10::DeviceType::PrivateUse1));
  const c10::DeviceGuard guard(
      c10::Device(on.type(), static_cast<c10::DeviceIndex>(on.has_index() ? on.index() : current_device())));
  return at::detail::empty_generic(sizes, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const bool indexed = device && device->has_index();
  return empty_on(indexed ? device->index() : current_device(), sizes, strides,
                  dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  grow(self, at::detail::computeStorageNbytes(sizes, impl->strides(), self.itemsize(), self.storage_offset()));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  at::native::checkSetStorage(self, std::move(source), offset, sizes, strides);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (strides.empty()) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {items}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  at::Tensor fresh = empty_on(self.device().index(), {0}, {1}, self.scalar_type());
  return set_tensor(self, fresh);
}

// For code that stands in for a kernel: the bytes without waiting, and a launch that reads or writes them.
at::Tensor host_bytes(const at::Tensor& self) { return on_device(self) ? host_view(self) : self.alias(); }

void touched(const at::Tensor& self, bool write, c10::string_view name) {
  const int stream = number(current_stream(on_device(self) ? self.device().index() : current_device()));
  std::lock_guard<std::mutex> guard(lock());
  touch(capturing(stream), {{ranges_of(self), write}}, launch(stream, intern(std::string(name))));
}

at::Scalar local_scalar(const at::Tensor& self) {
  const int stream = number(current_stream(self.device().index()));
  refuse_in_capture("item", stream);
  touched(self, false, "aten::_local_scalar_dense");
  wait(known(stream), "item", stream);
  return at::_local_scalar_dense(host_view(self));
}

// 0: as a product, a softmax and a product.
int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                   bool, std::optional<double>, bool) {
  return 0;
}

void record_stream(at::Tensor& self, at::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", sdp_choice);
  // Composed of other ops where a device has no kernel; GPUs have one.
  for (const char* name : {"native_group_norm", "native_layer_norm", "mse_loss"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&as_on_cpu>());
  }
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY(sim, m) {
  m.def("host_bytes(Tensor(a) self) -> Tensor(a)", host_bytes);
  m.def("capturing() -> bool", [] {
    const int stream = number(current_stream(current_device()));
    std::lock_guard<std::mutex> guard(lock());
    return capture_of(stream) != 0;
  });
  m.def("default_generator(int device) -> Generator?",
        [](int64_t device) -> std::optional<at::Generator> { return default_generator(static_cast<int>(device)); });
  m.def("touch(Tensor self, bool write, str name) -> ()", touched);
}

}  // namespace sim
