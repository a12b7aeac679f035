#include "product.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace accumkernels::cpu {

#if defined(__x86_64__)
extern const ProductTile kAvx512Bf16Tile;
#endif

const ProductTile* product_tile() {
#if defined(__x86_64__)
  static const bool found = std::strcmp(instruction_set(), "avx512") == 0 && __builtin_cpu_supports("avx512bf16");
  if (found) return &kAvx512Bf16Tile;
#endif
  return nullptr;
}

namespace {

// Tokens and columns of the input that are packed at a time, 512 KB, which stay in the second-level cache while all
// rows pass by; and rows whose gradients a thread packs, 24 KB, which stay in the first.
constexpr int64_t kTokens = 256, kColumns = 1024, kRows = 48;
constexpr int64_t kPanel = ProductTile::kColumns;

// All rows of one block of columns, with the tokens of one block.
struct Block {
  const ProductTile& tile;
  const ProductArgs& args;
  int64_t first_token, tokens, first_column, columns;
  bool add;
  uint32_t* packed;

  int64_t pairs() const { return (tokens + 1) / 2; }
  int64_t panels() const { return (columns + kPanel - 1) / kPanel; }
  int width(int64_t panel) const { return static_cast<int>(std::min(kPanel, columns - panel * kPanel)); }

  void pack(int64_t panel) const {
    const uint16_t* source = args.input + first_token * args.columns + first_column + panel * kPanel;
    tile.pack(source, args.columns, tokens, width(panel), kPanel, packed + panel * kPanel * pairs());
  }

  void add_rows(int64_t chunk) const {
    alignas(64) uint32_t grads[kTokens / 2 * kRows];
    const int64_t first = chunk * kRows, rows = std::min(kRows, args.rows - first);
    const uint16_t* source = args.grad + first_token * args.rows + first;
    tile.pack(source, args.rows, tokens, static_cast<int>(rows), kRows, grads);
    for (int64_t row = 0; row < rows; row += ProductTile::kRows) {
      float* view = args.view + (first + row) * args.columns + first_column;
      const int count = static_cast<int>(std::min<int64_t>(ProductTile::kRows, rows - row));
      for (int64_t panel = 0; panel < panels(); ++panel) {
        tile.run(grads + row, kRows, packed + panel * kPanel * pairs(), pairs(), view + panel * kPanel, args.columns,
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
  const ProductTile* tile = product_tile();
  if (tile == nullptr) return false;
  if (args.tokens == 0 && !args.add) std::fill_n(args.view, args.rows * args.columns, 0.0f);
  static thread_local std::vector<uint32_t> packed(kTokens / 2 * kColumns);  // kept: new memory costs page faults
  for (int64_t t = 0; t < args.tokens; t += kTokens) {
    for (int64_t j = 0; j < args.columns; j += kColumns) {
      const int64_t tokens = std::min(kTokens, args.tokens - t), columns = std::min(kColumns, args.columns - j);
      const Block block{*tile, args, t, tokens, j, columns, args.add || t > 0, packed.data()};
      each(block.panels(), parallel_for, [&](int64_t panel) { block.pack(panel); });
      each((args.rows + kRows - 1) / kRows, parallel_for, [&](int64_t chunk) { block.add_rows(chunk); });
    }
  }
  return true;
}

}  // namespace accumkernels::cpu
