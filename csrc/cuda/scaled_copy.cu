// scaled_copy_: outputs[i] = inputs[i] / divisor, between any two element types, rounded once.
#include "../core/args.h"
#include "../core/arithmetic.h"
#include "../core/flags.h"
#include "stream.h"
#include "table.h"

namespace accumkernels::cuda {
namespace {

struct CopyEntry {
  static constexpr int kBlocks = 3;  // that a multiprocessor runs at once

  void* output;
  const void* input;
  int64_t numel;
  uint32_t first_unit;
  uint32_t dtypes;  // output << 2 | input

  AK_HOST_DEVICE bool in_fp64() const {
    constexpr uint32_t kFloat64 = static_cast<uint32_t>(DType::kFloat64);
    return dtypes >> 2 == kFloat64 || (dtypes & 3u) == kFloat64;
  }
};

// Element types are told apart at each load and store, not by a body per pair of types: 14 bodies would be the bulk of
// the library, and the branches are the same for a whole block.
template <class Wide, bool kWideOutput, bool kWideInput>
struct ScaledCopy {
  static constexpr int kWidth = kWidthOf<Wide>;
  static constexpr int kUnroll = kWideOutput && kWideInput && sizeof(Wide) == 4 ? 4 : 1;

  void* output;
  const void* input;
  DType output_dtype;
  DType input_dtype;
  bool divides;
  Wide divisor;
  bool finite;

  template <class Input, int kGroup, int kCount>
  __device__ void load_wide(int64_t i, int64_t stride, Wide (&wide)[kCount][kGroup]) const {
    Input values[kCount][kGroup];
#pragma unroll
    for (int u = 0; u < kCount; ++u) load<kWideInput>(static_cast<const Input*>(input) + i + u * stride, values[u]);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) wide[u][k] = convert<Wide>(values[u][k]);
    }
  }

  template <class Output, int kGroup, int kCount>
  __device__ void store_narrow(int64_t i, int64_t stride, const Wide (&wide)[kCount][kGroup]) {
    Output values[kCount][kGroup];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        values[u][k] = convert<Output>(wide[u][k]);
        finite = finite && is_finite(convert<Wide>(values[u][k]));
      }
      store<kWideOutput>(values[u], static_cast<Output*>(output) + i + u * stride);
    }
  }

  template <int kGroup, int kCount>
  __device__ void run(int64_t i, int64_t stride) {
    Wide wide[kCount][kGroup];
    switch (input_dtype) {
      case DType::kFloat16:
        load_wide<Float16>(i, stride, wide);
        break;
      case DType::kBFloat16:
        load_wide<BFloat16>(i, stride, wide);
        break;
      case DType::kFloat32:
        load_wide<float>(i, stride, wide);
        break;
      case DType::kFloat64:
        if constexpr (sizeof(Wide) == 8) load_wide<double>(i, stride, wide);
        break;
    }
    if (divides) {
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int k = 0; k < kGroup; ++k) wide[u][k] = divide(wide[u][k], divisor);
      }
    }
    switch (output_dtype) {
      case DType::kFloat16:
        store_narrow<Float16>(i, stride, wide);
        break;
      case DType::kBFloat16:
        store_narrow<BFloat16>(i, stride, wide);
        break;
      case DType::kFloat32:
        store_narrow<float>(i, stride, wide);
        break;
      case DType::kFloat64:
        if constexpr (sizeof(Wide) == 8) store_narrow<double>(i, stride, wide);
        break;
    }
  }
};

template <class Wide>
__device__ bool copy_units(const CopyEntry& entry, Units units, const double* divisor) {
  const DType output_dtype = static_cast<DType>(entry.dtypes >> 2);
  const DType input_dtype = static_cast<DType>(entry.dtypes & 3u);
  constexpr int kWidth = kWidthOf<Wide>;
  return with_constant(is_aligned(entry.output, kWidth * size_of(output_dtype)), [&](auto wide_output) {
    return with_constant(is_aligned(entry.input, kWidth * size_of(input_dtype)), [&](auto wide_input) {
      ScaledCopy<Wide, decltype(wide_output)::value, decltype(wide_input)::value> body{
          entry.output, entry.input,        output_dtype,
          input_dtype,  divisor != nullptr, static_cast<Wide>(divisor ? *divisor : 1.0),
          true};
      for_each_group(units, entry.numel, body);
      return body.finite;
    });
  });
}

template <int32_t kCapacity>
__global__ void __launch_bounds__(kThreads, CopyEntry::kBlocks)
    scaled_copy_kernel(const Table<CopyEntry, kCapacity> __grid_constant__ table, const double* divisor,
                       double* found_inf) {
  table.for_each_tensor([&](const CopyEntry& entry, Units units) {
    const bool finite =
        entry.in_fp64() ? copy_units<double>(entry, units, divisor) : copy_units<float>(entry, units, divisor);
    if (!finite && found_inf != nullptr) raise(found_inf);
  });
}

}  // namespace

int scaled_copy(const ScaledCopyArgs& args, void* stream) {
  const auto fill = [](const CopyPair& pair, CopyEntry* entry) {
    entry->output = pair.output;
    entry->input = pair.input;
    entry->numel = pair.numel;
    entry->dtypes = static_cast<uint32_t>(pair.output_dtype) << 2 | static_cast<uint32_t>(pair.input_dtype);
    return unit_of(entry->in_fp64() ? 8 : 4);
  };
  const auto launch = [&](const auto& table, int64_t blocks, bool) {
    constexpr int32_t kCapacity = std::decay_t<decltype(table)>::kCapacity;
    return launch_kernel(scaled_copy_kernel<kCapacity>, blocks, kThreads, stream, table, args.divisor, args.found_inf);
  };
  return launch_in_tables<CopyEntry>(args.pairs, args.num_pairs, false, fill, launch);
}

}  // namespace accumkernels::cuda
