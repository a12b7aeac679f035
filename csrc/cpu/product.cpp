#include "product.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace accumkernels::cpu {

#if defined(__x86_64__)
extern const ProductTile kAvx2Fp32Tile, kAvx512Fp32Tile, kAvx512Bf16Tile;
#endif

const ProductTile* product_tile(DType operands) {
#if defined(__x86_64__)
  static const bool avx2 = std::strcmp(instruction_set(), "avx2") == 0;
  static const bool avx512 = std::strcmp(instruction_set(), "avx512") == 0;
  static const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (operands == DType::kBFloat16 && bf16) return &kAvx512Bf16Tile;
  if (operands == DType::kFloat32 && avx512) return &kAvx512Fp32Tile;
  if (operands == DType::kFloat32 && avx2) return &kAvx2Fp32Tile;
#endif
  return nullptr;
}

namespace {

// Words of tokens and columns of the input that are packed at a time, 512 KB, which stay in the second-level cache
// while all rows pass by; and rows whose gradients a thread packs, 24 KB, which stay in the first.
constexpr int64_t kSteps = 128, kColumns = 1024, kTiles = 8, kRows = kTiles * ProductTile::kRows;
constexpr int64_t kPanel = ProductTile::kColumns;

// All rows of one block of columns, with the tokens of one block.
struct Block {
  const ProductTile& tile;
  const ProductArgs& args;
  int64_t first_token, tokens, first_column, columns;
  bool add;
  uint32_t* packed;

  int64_t steps() const { return (tokens + tile.tokens_a_word - 1) / tile.tokens_a_word; }
  int64_t panels() const { return (columns + kPanel - 1) / kPanel; }
  int width(int64_t panel) const { return static_cast<int>(std::min(kPanel, columns - panel * kPanel)); }

  // Element [first_token, column] of an operand that has `width` columns.
  const void* element(const void* operand, int64_t width, int64_t column) const {
    return static_cast<const char*>(operand) + (first_token * width + column) * size_of(args.operands);
  }

  void pack(int64_t panel) const {
    const void* source = element(args.input, args.columns, first_column + panel * kPanel);
    tile.pack(source, args.columns, tokens, width(panel), kPanel, packed + panel * kPanel * steps());
  }

  // Chunks of whole tiles, up to kRows rows each: a multiple of 8, so that threads get as many rows each.
  int64_t row_tiles() const { return (args.rows + ProductTile::kRows - 1) / ProductTile::kRows; }
  int64_t row_chunks() const { return std::min(row_tiles(), (row_tiles() + kTiles * 8 - 1) / (kTiles * 8) * 8); }
  int64_t first_row(int64_t chunk) const {
    return std::min(args.rows, chunk * row_tiles() / row_chunks() * ProductTile::kRows);
  }

  void add_rows(int64_t chunk) const {
    alignas(64) uint32_t grads[kSteps * kRows];
    const int64_t first = first_row(chunk), rows = first_row(chunk + 1) - first;
    tile.pack(element(args.grad, args.rows, first), args.rows, tokens, static_cast<int>(rows), kRows, grads);
    for (int64_t row = 0; row < rows; row += ProductTile::kRows) {
      float* view = args.view + (first + row) * args.columns + first_column;
      const int count = static_cast<int>(std::min<int64_t>(ProductTile::kRows, rows - row));
      for (int64_t panel = 0; panel < panels(); ++panel) {
        tile.run(grads + row, kRows, packed + panel * kPanel * steps(), steps(), view + panel * kPanel, args.columns,
                 count, width(panel), args.alpha, add);
      }
    }
  }
};

template <class Work>
void each(int64_t count, ParallelFor parallel_for, Work work) {
  const auto range = [](int64_t begin, int64_t end, void* context) {
    for (int64_t i = begin; i < end; ++i) (*static_cast<Work*>(context))(i);
  };
  parallel_for(count, range, &work);
}

}  // namespace

bool add_product(const ProductArgs& args, ParallelFor parallel_for) {
  const ProductTile* tile = product_tile(args.operands);
  if (tile == nullptr) return false;
  if (args.tokens == 0 && !args.add) std::fill_n(args.view, args.rows * args.columns, 0.0f);
  static thread_local std::vector<uint32_t> packed(kSteps * kColumns);  // kept: new memory costs page faults
  const int64_t at_once = kSteps * tile->tokens_a_word;
  for (int64_t t = 0; t < args.tokens; t += at_once) {
    for (int64_t j = 0; j < args.columns; j += kColumns) {
      const int64_t tokens = std::min(at_once, args.tokens - t), columns = std::min(kColumns, args.columns - j);
      const Block block{*tile, args, t, tokens, j, columns, args.add || t > 0, packed.data()};
      each(block.panels(), parallel_for, [&](int64_t panel) { block.pack(panel); });
      each(block.row_chunks(), parallel_for, [&](int64_t chunk) { block.add_rows(chunk); });
    }
  }
  return true;
}

}  // namespace accumkernels::cpu
