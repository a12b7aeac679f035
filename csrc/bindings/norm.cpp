// norm_: the sum of squares of a list of tensors, or their largest magnitude.
#include <cmath>
#include <vector>

#include "../core/args.h"
#include "arguments.h"
#include "device.h"
#include "register.h"

namespace accumkernels {

void norm_(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  constexpr const char* op = "norm_";
  Arguments arguments(op, 3, stack, num_arguments);
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

ACCUMKERNELS_REGISTER(norm_)

}  // namespace accumkernels
