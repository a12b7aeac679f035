// Conversions of csrc/core/numeric.h over arrays. Compiled twice: as for a GPU (AK_EMULATED) and as for the host.
#include <cstdint>
#include <type_traits>

#include "../../csrc/core/args.h"
#include "../../csrc/core/numeric.h"

#ifdef AK_EMULATED
namespace device {
#else
namespace host {
#endif

using namespace accumkernels;

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <class Function>
void with_type(int dtype, Function function) {
  switch (static_cast<DType>(dtype)) {
    case DType::kFloat16:
      return function(Float16());
    case DType::kBFloat16:
      return function(BFloat16());
    case DType::kFloat32:
      return function(float());
    case DType::kFloat64:
      return function(double());
  }
}

void convert_all(uintptr_t to, int to_dtype, uintptr_t from, int from_dtype, int64_t count) {
  with_type(to_dtype, [&](auto output) {
    with_type(from_dtype, [&](auto input) {
      using To = decltype(output);
      using From = decltype(input);
      for (int64_t i = 0; i < count; ++i) at<To>(to)[i] = convert<To>(at<const From>(from)[i]);
    });
  });
}

// One byte per element.
void is_finite_all(uintptr_t to, uintptr_t from, int dtype, int64_t count) {
  with_type(dtype, [&](auto input) {
    using From = decltype(input);
    using Wide = std::conditional_t<sizeof(From) == 8, double, float>;
    for (int64_t i = 0; i < count; ++i) at<bool>(to)[i] = is_finite(convert<Wide>(at<const From>(from)[i]));
  });
}

}  // namespace
