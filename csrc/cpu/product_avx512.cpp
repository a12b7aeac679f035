// Compiled with the flags of spans_avx512.cpp; called only where the processor has what they name.
#if defined(__x86_64__)
#include "product_vec_avx512.h"

namespace accumkernels::cpu {
namespace {

struct Vec : Avx512Vec {
  using Word = Register;

  static Word words(const uint32_t* p) { return _mm512_loadu_ps(p); }
  static Word word(uint32_t x) { return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(x))); }
  static Register add_product(Register sum, Word g, Word x) { return _mm512_fmadd_ps(g, x, sum); }
};

}  // namespace
}  // namespace accumkernels::cpu

#include "product_impl.h"

namespace accumkernels::cpu {
extern const ProductTile kAvx512Fp32Tile;
constexpr ProductTile kAvx512Fp32Tile{1, pack_floats, run};
}  // namespace accumkernels::cpu
#endif
