// scaled_copy_: outputs[i] = inputs[i] / divisor, between any two element types, rounded once.
#include "../core/arithmetic.h"
#include "../core/flags.h"
#include "launch.h"
#include "stream.h"
#include "table.h"

namespace accumkernels::cuda {
namespace {

struct CopyEntry {
  void* output;
  const void* input;
  int64_t numel;
  uint32_t first_block;
  uint32_t dtypes;  // output << 2 | input
};

// Element types are told apart at each load and store, not by a body per pair of types: 14 bodies would be the bulk of
// the library, and the branches are the same for a whole block.
template <class Wide, bool kWideOutput, bool kWideInput>
struct ScaledCopy {
  static constexpr int kWidth = kWidthOf<Wide>;
  static constexpr int kUnroll = kWideOutput && kWideInput ? 4 : 2;
  static constexpr int64_t kStripe = kThreads * kWidth;

  void* output;
  const void* input;
  DType output_dtype;
  DType input_dtype;
  bool divides;
  Wide divisor;
  bool finite;

  template <class Input, int kGroup, int kCount>
  __device__ void load_wide(int64_t i, Wide (&wide)[kCount][kGroup]) const {
    Input values[kCount][kGroup];
#pragma unroll
    for (int u = 0; u < kCount; ++u) load<kWideInput>(static_cast<const Input*>(input) + i + u * kStripe, values[u]);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) wide[u][k] = convert<Wide>(values[u][k]);
    }
  }

  template <class Output, int kGroup, int kCount>
  __device__ void store_narrow(int64_t i, const Wide (&wide)[kCount][kGroup]) {
    Output values[kCount][kGroup];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int k = 0; k < kGroup; ++k) {
        values[u][k] = convert<Output>(wide[u][k]);
        finite = finite && is_finite(convert<Wide>(values[u][k]));
      }
      store<kWideOutput>(values[u], static_cast<Output*>(output) + i + u * kStripe);
    }
  }

  template <int kGroup, int kCount>
  __device__ void run(int64_t i) {
    Wide wide[kCount][kGroup];
    switch (input_dtype) {
      case DType::kFloat16:
        load_wide<Float16>(i, wide);
        break;
      case DType::kBFloat16:
        load_wide<BFloat16>(i, wide);
        break;
      case DType::kFloat32:
        load_wide<float>(i, wide);
        break;
      case DType::kFloat64:
        if constexpr (sizeof(Wide) == 8) load_wide<double>(i, wide);
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
        store_narrow<Float16>(i, wide);
        break;
      case DType::kBFloat16:
        store_narrow<BFloat16>(i, wide);
        break;
      case DType::kFloat32:
        store_narrow<float>(i, wide);
        break;
      case DType::kFloat64:
        if constexpr (sizeof(Wide) == 8) store_narrow<double>(i, wide);
        break;
    }
  }
};

template <class Wide>
__device__ bool copy_piece(const CopyEntry& entry, const Piece& piece, const double* divisor) {
  const DType output_dtype = static_cast<DType>(entry.dtypes >> 2);
  const DType input_dtype = static_cast<DType>(entry.dtypes & 3u);
  char* output = static_cast<char*>(entry.output) + piece.begin * size_of(output_dtype);
  const char* input = static_cast<const char*>(entry.input) + piece.begin * size_of(input_dtype);
  constexpr int kWidth = kWidthOf<Wide>;
  return with_constant(is_aligned(output, kWidth * size_of(output_dtype)), [&](auto wide_output) {
    return with_constant(is_aligned(input, kWidth * size_of(input_dtype)), [&](auto wide_input) {
      ScaledCopy<Wide, decltype(wide_output)::value, decltype(wide_input)::value> body{
          output, input, output_dtype, input_dtype, divisor != nullptr, static_cast<Wide>(divisor ? *divisor : 1.0),
          true};
      for_each_group(piece.size, body);
      return body.finite;
    });
  });
}

template <int32_t kCapacity>
__global__ void __launch_bounds__(kThreads, 4)
    scaled_copy_kernel(const Table<CopyEntry, kCapacity> __grid_constant__ table, const double* divisor,
                       double* found_inf) {
  const int32_t index = table.find(blockIdx.x);
  const CopyEntry& entry = table.entries[index];
  const Piece piece = table.piece(index, entry.numel, blockIdx.x);
  const uint32_t fp64 = static_cast<uint32_t>(DType::kFloat64);
  const bool in_fp64 = entry.dtypes >> 2 == fp64 || (entry.dtypes & 3u) == fp64;
  const bool finite = in_fp64 ? copy_piece<double>(entry, piece, divisor) : copy_piece<float>(entry, piece, divisor);
  if (!finite && found_inf != nullptr) raise(found_inf);
}

}  // namespace

int scaled_copy(const ScaledCopyArgs& args, void* stream) {
  const auto fill = [](const CopyPair& pair, CopyEntry* entry) {
    entry->output = pair.output;
    entry->input = pair.input;
    entry->numel = pair.numel;
    entry->dtypes = static_cast<uint32_t>(pair.output_dtype) << 2 | static_cast<uint32_t>(pair.input_dtype);
  };
  const auto launch = [&](const auto& table, int64_t blocks, bool) {
    constexpr int32_t kCapacity = std::decay_t<decltype(table)>::kCapacity;
    return launch_kernel(scaled_copy_kernel<kCapacity>, blocks, kThreads, stream, table, args.divisor, args.found_inf);
  };
  return launch_in_tables<CopyEntry>(args.pairs, args.num_pairs, false, fill, launch);
}

}  // namespace accumkernels::cuda
