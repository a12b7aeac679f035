// decide_: what becomes of a window, from its state.
#include "../core/args.h"
#include "arguments.h"
#include "device.h"
#include "register.h"

namespace accumkernels {

void decide_(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  constexpr const char* op = "decide_";
  Arguments arguments(op, 7, stack, num_arguments);
  const Tensor verdict = arguments.tensor();
  const Tensor single = arguments.tensor();
  const Tensor state = arguments.tensor();
  const Tensor divisor = arguments.optional_tensor();
  const Tensor norm = arguments.optional_tensor();
  const Tensor max_norm = arguments.optional_tensor();
  const Tensor overflow = arguments.optional_tensor();

  const Device device = verdict.device();
  check_array({op, "verdict"}, verdict, kFloat64, device, kVerdictCount);
  check_array({op, "single"}, single, kFloat32, device, kVerdictCount);
  check_array({op, "state"}, state, kFloat64, device, 4);
  DecideArgs args{};
  args.verdict = static_cast<double*>(verdict.mutable_data());
  args.single = static_cast<float*>(single.mutable_data());
  args.state = static_cast<const double*>(state.data());
  args.divisor = optional_scalar({op, "divisor"}, divisor, device);
  args.norm = optional_scalar({op, "norm"}, norm, device);
  args.max_norm = optional_scalar({op, "max_norm"}, max_norm, device);
  args.overflow = optional_scalar({op, "overflow"}, overflow, device);

  if (device.is_cpu()) return cpu::decide(args);
#ifdef ACCUMKERNELS_WITH_CUDA
  const CudaScope cuda(op, device);
  cuda.check(cuda::decide(args, cuda.stream()));
#endif
}

ACCUMKERNELS_REGISTER(decide_)

}  // namespace accumkernels
