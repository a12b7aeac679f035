// The ops as torch calls them: takes their arguments apart, checks them before anything is written, and calls cpu/ or
// cuda/ by the device of the tensors. This file and bindings/ are all that sees torch, and only its stable ABI.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/tensor.h"
#include "build_info.h"
#include "core/args.h"
#include "cpu/kernels.h"
#ifdef ACCUMKERNELS_WITH_CUDA
#include "cuda/launch.h"

// Not in the libtorch of a CPU-only torch, where nothing calls them: weak, so that the library loads there too.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);
__attribute__((weak)) AOTITorchError torch_c10_cuda_check_msg(int32_t, const char*, const char*, uint32_t, bool,
                                                              char**);
__attribute__((weak)) void torch_c10_cuda_free_error_msg(char*);
}
#endif

namespace accumkernels {
namespace {

void parallel_for(int64_t end, void (*function)(int64_t, int64_t, void*), void* context) {
  call(torch_parallel_for(0, end, 1, function, context), "parallel_for");
}

#ifdef ACCUMKERNELS_WITH_CUDA
// Makes a device and its current stream the place of what follows.
class CudaScope {
 public:
  CudaScope(const char* op, const Device& device) : op_(op), device_(device) {
    call(aoti_torch_create_device_guard(device.index, &guard_), "switching the device");
  }
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;
  ~CudaScope() { aoti_torch_delete_device_guard(guard_); }

  void* stream() const {
    void* stream;
    call(aoti_torch_get_current_cuda_stream(device_.index, &stream), "reading the current stream");
    return stream;
  }

  // From torch's allocator, so that it may be captured in a graph, and freed in the order of the stream.
  Tensor workspace() const {
    const int64_t size = cuda::workspace_size(), stride = 1;
    AtenTensorHandle handle;
    if (aoti_torch_empty_strided(1, &size, &stride, kFloat64, device_.type, device_.index, &handle)) {
      fail(op_, ": CUDA out of memory: no ", size * 8, " bytes of workspace on ", device_);
    }
    return Tensor(handle);
  }

  void check(int error) const {
    if (error == 0) return;
    char* message = nullptr;
    torch_c10_cuda_check_msg(error, "accumkernels", op_, 0, true, &message);
    const std::string text = message ? message : "CUDA error " + std::to_string(error);
    if (message) torch_c10_cuda_free_error_msg(message);
    fail(op_, ": ", text);
  }

 private:
  const char* op_;
  Device device_;
  DeviceGuardHandle guard_;
};
#endif

void accumulate_(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  constexpr const char* op = "accumulate_";
  Arguments arguments(op, stack, num_arguments, 15);
  const Tensor buffer = arguments.tensor();
  const Tensor state = arguments.tensor();
  const std::vector<Tensor> grads = arguments.tensors();
  const std::vector<int64_t> segments = arguments.ints();
  const std::vector<uint8_t> overwrite = arguments.bools();
  const Tensor layout = arguments.tensor();
  const Tensor layout_host = arguments.tensor();
  const Tensor flags = arguments.optional_tensor();
  const int64_t tag = arguments.value<int64_t>();
  const double weight = arguments.value<double>();
  const Tensor weight_tensor = arguments.optional_tensor();
  const Tensor loss_scale = arguments.optional_tensor();
  const Tensor drop = arguments.optional_tensor();
  const Tensor sq_norm = arguments.optional_tensor();
  const bool count = arguments.value<bool>();

  const Device device = buffer.device();
  const int32_t dtype = buffer.dtype();
  if (dtype != kFloat32 && dtype != kFloat64) {
    fail(op, ": buffer is ", dtype_name(dtype), ", expected torch.float32 or torch.float64");
  }
  check_array({op, "buffer"}, buffer, dtype, device, 0);
  check_array({op, "state"}, state, kFloat64, device, 4);
  const int64_t num_segments = layout_host.rows();
  if (num_segments < 0) fail(op, ": layout_host has another shape than [segments, 2]");
  check_array({op, "layout_host"}, layout_host, kInt64, Device{Device::kCpu, 0}, 0);
  if (layout.rows() != num_segments) fail(op, ": layout has another shape than layout_host");
  check_array({op, "layout"}, layout, kInt64, device, 0);
  if (flags) check_array({op, "flags"}, flags, kInt32, device, num_segments);
  if (sq_norm) check_array({op, "sq_norm"}, sq_norm, kFloat64, device, 2);
  if (loss_scale) check_scalar({op, "loss_scale"}, loss_scale, kFloat32, device);
  check_length(op, "segments", segments.size(), "grads", grads.size());
  check_length(op, "overwrite", overwrite.size(), "grads", grads.size());

  const auto* rows = static_cast<const int64_t*>(layout_host.data());
  const int64_t end = buffer.numel();
  std::vector<Gradient> gradients;
  gradients.reserve(grads.size());
  for (size_t k = 0; k < grads.size(); ++k) {
    const int64_t i = static_cast<int64_t>(k);
    const Name name{op, "grads", i};
    const DType type = check_dense(name, grads[k], device);
    const int64_t segment = segments[k];
    check_segment(op, i, segment, num_segments);
    const int64_t offset = rows[2 * segment], numel = rows[2 * segment + 1];
    if (grads[k].numel() != numel) {
      fail(name, " has ", grads[k].numel(), " elements, expected ", numel, " of segment ", segment);
    }
    if (offset < 0 || offset > end - numel) {
      fail(op, ": layout_host[", segment, "] is (", offset, ", ", numel, "), outside the buffer's ", end, " elements");
    }
    gradients.push_back({grads[k].data(), numel, offset, static_cast<int32_t>(segment), type, overwrite[k] != 0});
  }
  check_distinct(op, segments, num_segments);

  AccumulateArgs args{};
  args.weight_tensor = optional_scalar({op, "weight_tensor"}, weight_tensor, device);
  args.drop = optional_scalar({op, "drop"}, drop, device);
  args.sq_norm = sq_norm ? static_cast<double*>(sq_norm.mutable_data()) : nullptr;
  args.buffer = buffer.mutable_data();
  args.buffer_dtype = dtype == kFloat64 ? DType::kFloat64 : DType::kFloat32;
  args.gradients = gradients.data();
  args.num_gradients = static_cast<int64_t>(gradients.size());
  args.layout = static_cast<const int64_t*>(layout.data());
  args.state = static_cast<double*>(state.mutable_data());
  args.flags = flags ? static_cast<int32_t*>(flags.mutable_data()) : nullptr;
  args.tag = static_cast<int32_t>(tag);
  args.weight = weight;
  args.loss_scale = loss_scale ? static_cast<const float*>(loss_scale.data()) : nullptr;
  args.count = count;

  if (device.is_cpu()) return cpu::accumulate(args, parallel_for);
#ifdef ACCUMKERNELS_WITH_CUDA
  const CudaScope cuda(op, device);
  const Tensor workspace = args.sq_norm ? cuda.workspace() : Tensor(nullptr);
  auto* scratch = workspace ? static_cast<double*>(workspace.mutable_data()) : nullptr;
  cuda.check(cuda::accumulate(args, scratch, cuda.stream()));
#endif
}

void check_finite_(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  constexpr const char* op = "check_finite_";
  Arguments arguments(op, stack, num_arguments, 6);
  const std::vector<Tensor> grads = arguments.tensors();
  const std::vector<int64_t> segments = arguments.ints();
  const Tensor found_inf = arguments.tensor();
  const Tensor flags = arguments.tensor();
  const int64_t tag = arguments.value<int64_t>();
  const Tensor weight_tensor = arguments.optional_tensor();

  const Device device = found_inf.device();
  check_array({op, "flags"}, flags, kInt32, device, 0);
  check_length(op, "segments", segments.size(), "grads", grads.size());
  const int64_t num_segments = flags.numel();
  std::vector<Gradient> gradients;
  gradients.reserve(grads.size());
  for (size_t k = 0; k < grads.size(); ++k) {
    const int64_t i = static_cast<int64_t>(k);
    const DType type = check_dense({op, "grads", i}, grads[k], device);
    check_segment(op, i, segments[k], num_segments);
    gradients.push_back({grads[k].data(), grads[k].numel(), 0, static_cast<int32_t>(segments[k]), type, false});
  }

  CheckFiniteArgs args{};
  args.found_inf = mutable_scalar({op, "found_inf"}, found_inf, device);
  args.weight_tensor = optional_scalar({op, "weight_tensor"}, weight_tensor, device);
  args.gradients = gradients.data();
  args.num_gradients = static_cast<int64_t>(gradients.size());
  args.flags = static_cast<int32_t*>(flags.mutable_data());
  args.tag = static_cast<int32_t>(tag);

  if (device.is_cpu()) return cpu::check_finite(args, parallel_for);
#ifdef ACCUMKERNELS_WITH_CUDA
  const CudaScope cuda(op, device);
  cuda.check(cuda::check_finite(args, cuda.stream()));
#endif
}

void norm_(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  constexpr const char* op = "norm_";
  Arguments arguments(op, stack, num_arguments, 3);
  const Tensor out = arguments.tensor();
  const std::vector<Tensor> tensors = arguments.tensors();
  const double ord = arguments.value<double>();

  const Device device = out.device();
  if (ord != 2 && ord != HUGE_VAL) fail(op, ": ord is ", ord, ", expected 2 or inf");
  std::vector<Span> spans;
  spans.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const DType type = check_dense({op, "tensors", static_cast<int64_t>(i)}, tensors[i], device);
    spans.push_back({tensors[i].data(), tensors[i].numel(), type});
  }

  NormArgs args{};
  args.out = mutable_scalar({op, "out"}, out, device);
  args.spans = spans.data();
  args.num_spans = static_cast<int64_t>(spans.size());
  args.norm = ord == 2 ? Norm::kL2 : Norm::kInf;

  if (device.is_cpu()) return cpu::norm(args, parallel_for);
#ifdef ACCUMKERNELS_WITH_CUDA
  const CudaScope cuda(op, device);
  const Tensor workspace = cuda.workspace();
  cuda.check(cuda::norm(args, static_cast<double*>(workspace.mutable_data()), cuda.stream()));
#endif
}

void scaled_copy_(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  constexpr const char* op = "scaled_copy_";
  Arguments arguments(op, stack, num_arguments, 4);
  const std::vector<Tensor> outputs = arguments.tensors();
  const std::vector<Tensor> inputs = arguments.tensors();
  const Tensor divisor = arguments.optional_tensor();
  const Tensor found_inf = arguments.optional_tensor();

  check_length(op, "inputs", inputs.size(), "outputs", outputs.size());
  if (outputs.empty()) return;
  const Device device = outputs[0].device();
  std::vector<CopyPair> pairs;
  pairs.reserve(outputs.size());
  for (size_t k = 0; k < outputs.size(); ++k) {
    const int64_t i = static_cast<int64_t>(k);
    const DType output_type = check_dense({op, "outputs", i}, outputs[k], device);
    const DType input_type = check_dense({op, "inputs", i}, inputs[k], device);
    const int64_t numel = outputs[k].numel();
    if (inputs[k].numel() != numel) {
      fail(Name{op, "inputs", i}, " has ", inputs[k].numel(), " elements, expected ", numel, " as outputs[", i, "]");
    }
    pairs.push_back({outputs[k].mutable_data(), inputs[k].data(), numel, output_type, input_type});
  }

  ScaledCopyArgs args{};
  args.divisor = optional_scalar({op, "divisor"}, divisor, device);
  args.found_inf = mutable_scalar({op, "found_inf"}, found_inf, device);
  args.pairs = pairs.data();
  args.num_pairs = static_cast<int64_t>(pairs.size());

  if (device.is_cpu()) return cpu::scaled_copy(args, parallel_for);
#ifdef ACCUMKERNELS_WITH_CUDA
  const CudaScope cuda(op, device);
  cuda.check(cuda::scaled_copy(args, cuda.stream()));
#endif
}

void register_all(torch::stable::detail::StableLibrary& library) {
  library.impl("accumulate_", accumulate_);
  library.impl("check_finite_", check_finite_);
  library.impl("norm_", norm_);
  library.impl("scaled_copy_", scaled_copy_);
}

STABLE_TORCH_LIBRARY_IMPL(accumkernels, CPU, library) { register_all(library); }
#ifdef ACCUMKERNELS_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(accumkernels, CUDA, library) { register_all(library); }
#endif

}  // namespace
}  // namespace accumkernels

#define AK_EXPORT extern "C" __attribute__((visibility("default")))

// What the library was built from and for, as JSON.
AK_EXPORT const char* accumkernels_build_info() { return ACCUMKERNELS_BUILD_INFO; }

AK_EXPORT const char* accumkernels_cpu_instruction_set() { return accumkernels::cpu::instruction_set(); }

// 0 where the CUDA kernels can run on the device, else an error code and, in message, its cause.
AK_EXPORT int accumkernels_probe(int device, char* message, int size) {
#ifdef ACCUMKERNELS_WITH_CUDA
  return accumkernels::cuda::probe(device, message, size);
#else
  (void)device;
  std::snprintf(message, size, "built without CUDA");
  return -1;
#endif
}
