// accumulate_: gradients times weight / loss_scale into a flat buffer.
#include <vector>

#include "../core/args.h"
#include "arguments.h"
#include "device.h"
#include "register.h"

namespace accumkernels {

void accumulate_(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  constexpr const char* op = "accumulate_";
  Arguments arguments(op, 16, stack, num_arguments);
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
  const bool contiguous = arguments.value<bool>();

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
  if (!segments.empty()) check_length(op, "segments", segments.size(), "grads", grads.size());
  if (overwrite.size() != 1) check_length(op, "overwrite", overwrite.size(), "grads", grads.size());

  const auto* rows = static_cast<const int64_t*>(layout_host.data());
  const int64_t end = buffer.numel();
  std::vector<Gradient> gradients;
  gradients.reserve(grads.size());
  for (size_t k = 0; k < grads.size(); ++k) {
    const int64_t i = static_cast<int64_t>(k);
    const Name name{op, "grads", i};
    const DType type = check_dense(name, grads[k], device, contiguous);
    const int64_t segment = segments.empty() ? i : segments[k];
    check_segment(op, i, segment, num_segments);
    const int64_t offset = rows[2 * segment], numel = rows[2 * segment + 1];
    if (grads[k].numel() != numel) {
      fail(name, " has ", grads[k].numel(), " elements, expected ", numel, " of segment ", segment);
    }
    if (offset < 0 || offset > end - numel) {
      fail(op, ": layout_host[", segment, "] is (", offset, ", ", numel, "), outside the buffer's ", end, " elements");
    }
    const bool first = overwrite[overwrite.size() == 1 ? 0 : k] != 0;
    gradients.push_back({grads[k].data(), numel, offset, static_cast<int32_t>(segment), type, first});
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

ACCUMKERNELS_REGISTER(accumulate_)

}  // namespace accumkernels
