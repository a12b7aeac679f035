// check_finite_: flags the gradients that hold a value that is not finite, before anything is accumulated.
#include "../core/args.h"
#include "../core/micro_batch.h"
#include "stream.h"
#include "table.h"

namespace accumkernels::cuda {
namespace {

struct CheckEntry {
  static constexpr int kBlocks = 6;  // that a multiprocessor runs at once

  const void* data;
  int64_t numel;
  uint32_t first_unit;
  uint32_t packed;  // segment << 2 | dtype
};

constexpr int64_t kMaxSegments = int64_t{1} << 30;

template <class Element, bool kWide>
struct CheckFinite {
  static constexpr int kWidth = kWidthOf<Element>;
  static constexpr int kUnroll = kWidth > 4 ? 2 : 4;  // 32 or 64 bytes in flight per thread, of 8 blocks
  using Value = std::conditional_t<sizeof(Element) == 8, double, float>;

  const Element* data;
  bool finite;

  template <int kGroup, int kCount>
  __device__ void run(int64_t i, int64_t stride) {
    Element values[kCount][kGroup];
#pragma unroll
    for (int u = 0; u < kCount; ++u) load<kWide>(data + i + u * stride, values[u]);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) finite = finite && is_finite(convert<Value>(values[u][k]));
    }
  }
};

__device__ bool units_are_finite(const CheckEntry& entry, Units units) {
  bool finite = true;
  with_elements(entry.data, static_cast<DType>(entry.packed & 3u), [&](auto* data) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(data)>>;
    with_constant(is_aligned<kWidthOf<Element>>(data), [&](auto wide) {
      CheckFinite<Element, decltype(wide)::value> body{data, true};
      for_each_group(units, entry.numel, body);
      finite = body.finite;
    });
  });
  return finite;
}

template <int32_t kCapacity>
__global__ void __launch_bounds__(kThreads)
    check_finite_kernel(const Table<CheckEntry, kCapacity> __grid_constant__ table,
                        const CheckFiniteArgs __grid_constant__ args) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && args.weight_tensor != nullptr && is_bad_weight(*args.weight_tensor)) {
    raise(args.found_inf);
  }
  table.for_each_tensor([&](const CheckEntry& entry, Units units) {
    if (!units_are_finite(entry, units)) {
      raise(args.found_inf);
      set_flag(&args.flags[entry.packed >> 2], args.tag);
    }
  });
}

}  // namespace

int check_finite(const CheckFiniteArgs& args, void* stream) {
  for (int64_t i = 0; i < args.num_gradients; ++i) {
    if (args.gradients[i].segment >= kMaxSegments) return cudaErrorInvalidValue;
  }
  const auto fill = [](const Gradient& gradient, CheckEntry* entry) {
    entry->data = gradient.data;
    entry->numel = gradient.numel;
    entry->packed = static_cast<uint32_t>(gradient.segment) << 2 | static_cast<uint32_t>(gradient.dtype);
    return unit_of(size_of(gradient.dtype));
  };
  const auto launch = [&](const auto& table, int64_t blocks, bool) {
    constexpr int32_t kCapacity = std::decay_t<decltype(table)>::kCapacity;
    return launch_kernel(check_finite_kernel<kCapacity>, blocks, kThreads, stream, table, args);
  };
  return launch_in_tables<CheckEntry>(args.gradients, args.num_gradients, args.weight_tensor != nullptr, fill, launch);
}

}  // namespace accumkernels::cuda
