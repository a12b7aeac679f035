// accumulate_, against the reference.
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "check.h"
#include "reference.h"

namespace check {
namespace {

using namespace accumkernels;

constexpr double kSquaresTolerance = 1e-12;  // sums of some 100,000 terms in fp64, in another order
constexpr int64_t kGap = 32;                 // elements of the buffer between two segments

struct Tensor {
  int64_t numel;
  DType dtype;
  bool overwrite = false;
  int shift = 0;                              // elements past its alignment
  std::optional<double> last = std::nullopt;  // replaces its last element
};

// One call, with what its arguments are; those that are not given are null.
struct Call {
  DType buffer = DType::kFloat32;
  int buffer_shift = 0;    // elements by which segments are off their alignment
  bool backwards = false;  // gradients come in the reverse order of their segments
  double weight = 1.0;
  std::optional<double> weight_tensor = std::nullopt, loss_scale = std::nullopt, drop = std::nullopt;
  std::optional<double> before = std::nullopt;  // fills the buffer
  bool flags = true, squares = false, count = true;
};

template <class T>
T* at(std::optional<Array>* array, bool device) {
  if (!array->has_value()) return nullptr;
  return device ? (*array)->device<T>() : (*array)->expected<T>();
}

// Runs it on the device and by the reference, and compares the buffer with its gaps and all that is written.
void run(const std::vector<Tensor>& tensors, const Call& call) {
  const int64_t n = static_cast<int64_t>(tensors.size());
  std::vector<Array> grads;
  Array layout("layout", Array::kInt64, 2 * n + 2);  // one more, since it may not be empty
  int64_t end = kGap;
  for (int64_t i = 0; i < n; ++i) {
    const Tensor& tensor = tensors[i];
    const std::string name = std::string(name_of(tensor.dtype)) + " gradient " + std::to_string(i);
    grads.emplace_back(name, kind_of(tensor.dtype), tensor.numel, tensor.shift * size_of(tensor.dtype));
    fill(&grads.back(), tensor.dtype, static_cast<uint32_t>(i + 1));
    if (tensor.last) reference::put(tensor.dtype, *tensor.last, grads.back().expected<void>(), tensor.numel - 1);
    layout.expected<int64_t>()[2 * i] = end + call.buffer_shift;
    layout.expected<int64_t>()[2 * i + 1] = tensor.numel;
    end += (tensor.numel + call.buffer_shift + 2 * kGap - 1) / kGap * kGap;
  }
  Array buffer(std::string(name_of(call.buffer)) + " buffer", kind_of(call.buffer), end);
  fill(&buffer, call.buffer, 99);
  for (int64_t i = 0; call.before && i < end; ++i) {
    reference::put(call.buffer, *call.before, buffer.expected<void>(), i);
  }
  Array state("state", Array::kFloat64, 4);
  state.expected<double>()[kWeight] = 3.5;
  state.expected<double>()[kUsed] = 2.0;
  Array workspace("workspace", Array::kFloat64, cuda::workspace_size());
  std::optional<Array> flags, squares, weight, loss_scale, drop;
  if (call.flags) flags.emplace("flags", Array::kInt32, n + 1);
  if (call.squares) squares.emplace("sq_norm", Array::kFloat64, 2);
  if (call.weight_tensor) weight.emplace(scalar("weight", DType::kFloat64, *call.weight_tensor));
  if (call.loss_scale) loss_scale.emplace(scalar("loss scale", DType::kFloat32, *call.loss_scale));
  if (call.drop) drop.emplace(scalar("drop", DType::kFloat64, *call.drop));

  std::vector<Gradient> gradients;
  const auto arguments = [&](bool device) {
    gradients.clear();
    for (int64_t k = 0; k < n; ++k) {
      const int64_t i = call.backwards ? n - 1 - k : k;
      const void* data = device ? grads[i].device<void>() : grads[i].expected<void>();
      if (call.drop && *call.drop != 0.0) data = reinterpret_cast<const void*>(16);  // may not be read
      gradients.push_back({data, tensors[i].numel, layout.expected<int64_t>()[2 * i], static_cast<int32_t>(i),
                           tensors[i].dtype, tensors[i].overwrite});
    }
    AccumulateArgs args{};
    args.buffer = device ? buffer.device<void>() : buffer.expected<void>();
    args.buffer_dtype = call.buffer;
    args.gradients = gradients.data();
    args.num_gradients = n;
    args.layout = device ? layout.device<int64_t>() : layout.expected<int64_t>();
    args.state = device ? state.device<double>() : state.expected<double>();
    args.flags = at<int32_t>(&flags, device);
    args.tag = 7;
    args.weight = call.weight;
    args.weight_tensor = at<double>(&weight, device);
    args.loss_scale = at<float>(&loss_scale, device);
    args.drop = at<double>(&drop, device);
    args.sq_norm = at<double>(&squares, device);
    args.count = call.count;
    return args;
  };
  std::vector<Array*> written{&buffer, &state};
  if (flags) written.push_back(&*flags);
  std::vector<Array*> read{&layout};
  for (Array& grad : grads) read.push_back(&grad);
  for (auto* scalar : {&weight, &loss_scale, &drop}) {
    if (*scalar) read.push_back(&**scalar);
  }
  for (Array* array : written) array->upload();
  for (Array* array : read) array->upload();
  if (squares) squares->upload();
  succeed(cuda::accumulate(arguments(true), call.squares ? workspace.device<double>() : nullptr, nullptr),
          "accumulate");
  reference::accumulate(arguments(false));
  for (Array* array : written) array->compare();
  for (Array* array : read) array->compare();
  if (squares) squares->compare(kSquaresTolerance);
}

// All sizes, with first touches among them.
std::vector<Tensor> all_sizes(DType dtype, int shift) {
  std::vector<Tensor> tensors;
  for (const int64_t size : kSizes) tensors.push_back({size, dtype, tensors.size() % 3 == 1, shift});
  return tensors;
}

void dtypes() {
  for (const DType buffer : {DType::kFloat32, DType::kFloat64}) {
    for (const DType dtype : kDTypes) {
      for (const int shift : {0, 1}) {
        for (const int buffer_shift : {0, 1}) {
          Call call;
          call.buffer = buffer;
          call.buffer_shift = buffer_shift;
          call.squares = shift == buffer_shift;
          call.weight = call.squares ? 300.0 : 0.3;  // large, since little is left of a growth whose terms cancel
          call.loss_scale = 1.5;
          run(all_sizes(dtype, shift), call);
        }
      }
    }
  }
}

void mixed() {
  std::mt19937 random(5);
  for (int round = 0; round < 4; ++round) {
    std::vector<Tensor> tensors;
    for (int i = 0; i < 40; ++i) {
      const int64_t numel = random() % (i % 4 == 0 ? 20000 : 300);
      tensors.push_back({numel, kDTypes[random() % 4], random() % 2 == 0, static_cast<int>(random() % 9)});
    }
    Call call;
    call.buffer = round % 2 == 0 ? DType::kFloat32 : DType::kFloat64;
    call.buffer_shift = static_cast<int>(random() % 5);
    call.backwards = round < 2;
    call.weight_tensor = 0.7;
    run(tensors, call);
  }
}

std::vector<Tensor> few(std::optional<double> last) {
  return {{300, DType::kBFloat16}, {9000, DType::kBFloat16, true, 0, last}, {17, DType::kFloat32}};
}

void first_touch() {
  for (const double before : {kNaN, kInfinity, -1.0}) {  // what a buffer that nobody zeroed may hold
    Call call;
    call.before = before;
    call.flags = !std::isnan(before);
    run({{9000, DType::kFloat16, true}, {5, DType::kBFloat16, true, 1}}, call);
  }
}

void dropped() {
  for (const DType buffer : {DType::kFloat32, DType::kFloat64}) {
    for (const int shift : {0, 1}) {
      for (const bool squares : {false, true}) {
        Call call;
        call.buffer = buffer;
        call.buffer_shift = shift;
        call.drop = 1.0;
        call.squares = squares;
        run(few(kInfinity), call);
      }
    }
  }
  Call kept;
  kept.drop = 0.0;
  run(few(std::nullopt), kept);
}

void not_finite() {
  for (const double value : {kInfinity, -kInfinity, kNaN}) {
    for (const DType dtype : kDTypes) {
      for (const int64_t size : {1, 9, 4096, 10001}) {
        run({{size, dtype}, {size, dtype, size == 9, 0, value}, {size, dtype, true}}, Call());
      }
    }
    Call unchecked;
    unchecked.flags = false;
    run(few(value), unchecked);
  }
}

void sum_overflows() {
  Call call;
  call.before = 3.4e38;
  call.weight = 1e36;
  run({{9000, DType::kFloat32}, {100, DType::kBFloat16, true}}, call);
  call.buffer = DType::kFloat64;
  call.before = 1.79e308;
  call.weight = 1e306;
  run({{9000, DType::kFloat32}, {100, DType::kFloat64, true}}, call);
  run({{9000, DType::kFloat64, true, 0, 1e10}}, call);  // here the product does
}

void weights() {
  const std::vector<Tensor> tensors = few(std::nullopt);
  for (const double value : {0.0, 0.1, 1e-30, 3e5, -1.0, kNaN, kInfinity}) {
    Call number, tensor, scaled, uncounted;
    number.weight = value;
    tensor.weight_tensor = value;
    scaled.weight_tensor = value;
    scaled.loss_scale = 65536.0;
    uncounted.weight_tensor = value;
    uncounted.count = false;
    for (const Call& call : {number, tensor, scaled, uncounted}) run(tensors, call);
  }
}

// Each instance of the kernel, by the buffer's dtype, squares and the table, on its widest and its odd accesses.
void many() {
  for (const DType buffer : {DType::kFloat32, DType::kFloat64}) {
    for (const bool squares : {false, true}) {
      for (const int64_t count :
           {255, 256, 257, 1500, 2031, 2032, 4070}) {  // a short table holds 256, a long one 2,031
        std::vector<Tensor> tensors;
        for (int64_t i = 0; i < count; ++i) {
          const bool bad = i == count / 2 || i == count - 1;
          tensors.push_back({i == count / 3 ? 8200 : 1 + i % 70, kDTypes[i % 4], i % 5 == 0, 0});
          if (bad && !squares) tensors.back().last = kInfinity;
        }
        Call call;
        call.buffer = buffer;
        call.squares = squares;
        call.flags = !squares;
        run(tensors, call);
      }
    }
  }
}

void empty() {
  for (const bool count : {true, false}) {
    for (const bool squares : {true, false}) {
      Call call;
      call.count = count;
      call.squares = squares;
      run({}, call);
      run({{0, DType::kBFloat16}, {0, DType::kFloat64, true}}, call);
      run({{0, DType::kBFloat16}, {5, DType::kFloat32}, {0, DType::kFloat16}}, call);
    }
  }
}

// What threads of several blocks do at once, and small enough for ThreadSanitizer.
void blocks() {
  for (const bool squares : {false, true}) {
    Call call;
    call.squares = squares;
    run({{9000, DType::kBFloat16, false, 0, squares ? 1.0 : kInfinity}, {5, DType::kBFloat16, true}}, call);
  }
}

}  // namespace

const std::vector<Check> kAccumulate = {
    {"accumulate/dtypes", "every dtype into fp32 and fp64, sizes around every boundary, each side aligned or not",
     dtypes},
    {"accumulate/mixed", "lists of mixed dtypes, random sizes and alignments, segments in reverse order", mixed},
    {"accumulate/first-touch", "a first touch stores, whatever the buffer held", first_touch},
    {"accumulate/dropped", "a dropped micro-batch adds nothing; its first touches store zeros", dropped},
    {"accumulate/not-finite", "infinities and NaN flag their own gradient alone; without flags nothing", not_finite},
    {"accumulate/overflow", "a sum that overflows alone poisons the window and flags nobody", sum_overflows},
    {"accumulate/weights", "weights as numbers and tensors, with a loss scale; bad ones", weights},
    {"accumulate/many", "every buffer, with and without squares, short and long tables to their last entries", many},
    {"accumulate/empty", "empty lists, tensors without elements", empty},
    {"accumulate/blocks", "flags and sums of squares of several blocks", blocks},
};

}  // namespace check
