// check_finite_: flags gradients that hold a value that is not finite.
#include <vector>

#include "../core/args.h"
#include "arguments.h"
#include "device.h"
#include "register.h"

namespace accumkernels {

void check_finite_(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  constexpr const char* op = "check_finite_";
  Arguments arguments(op, 6, stack, num_arguments);
  const std::vector<Tensor> grads = arguments.tensors();
  const std::vector<int64_t> segments = arguments.ints();
  const Tensor found_inf = arguments.tensor();
  const Tensor flags = arguments.tensor();
  const int64_t tag = arguments.value<int64_t>();
  const Tensor weight_tensor = arguments.optional_tensor();

  const Device device = found_inf.device();
  check_array({op, "flags"}, flags, kInt32, device, 0);
  if (!segments.empty()) check_length(op, "segments", segments.size(), "grads", grads.size());
  const int64_t num_segments = flags.numel();
  std::vector<Gradient> gradients;
  gradients.reserve(grads.size());
  for (size_t k = 0; k < grads.size(); ++k) {
    const int64_t i = static_cast<int64_t>(k);
    const DType type = check_dense({op, "grads", i}, grads[k], device);
    const int64_t segment = segments.empty() ? i : segments[k];
    check_segment(op, i, segment, num_segments);
    gradients.push_back({grads[k].data(), grads[k].numel(), 0, static_cast<int32_t>(segment), type, false});
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

ACCUMKERNELS_REGISTER(check_finite_)

}  // namespace accumkernels
