#include "check.h"

#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "reference.h"

namespace check {

Tally tally;

namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kGuard = 64;       // bytes behind an array
constexpr char kGuardByte = '\x5a';  // repeated, a number of every type, which would show in a sum
constexpr int64_t kShownFailures = 10;
constexpr int64_t kBytesOf[] = {2, 2, 4, 8, 4, 8};  // of each Kind

// Of elements that differ in their bits.
bool same(Array::Kind kind, const char* found, const char* wanted, double tolerance) {
  if (kind > Array::kFloat64) return false;
  const double is = reference::get(static_cast<DType>(kind), found, 0);
  const double should_be = reference::get(static_cast<DType>(kind), wanted, 0);
  if (std::isnan(should_be)) return std::isnan(is);
  return tolerance > 0.0 && std::fabs(is - should_be) <= tolerance * std::fabs(should_be);
}

std::string text(Array::Kind kind, const char* element) {
  uint64_t bits = 0;
  std::memcpy(&bits, element, static_cast<size_t>(kBytesOf[kind]));
  char line[80];
  if (kind <= Array::kFloat64) {
    const double value = reference::get(static_cast<DType>(kind), element, 0);
    std::snprintf(line, sizeof(line), "%.17g (0x%" PRIx64 ")", value, bits);
  } else {
    std::snprintf(line, sizeof(line), "%" PRId64, static_cast<int64_t>(bits));
  }
  return line;
}

}  // namespace

void expect(bool holds, const std::string& what) {
  ++tally.values;
  if (holds) return;
  if (tally.failures++ < kShownFailures) std::printf("  wrong: %s\n", what.c_str());
}

void succeed(int error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}

Array::Array(std::string name, Kind kind, int64_t count, int64_t shift)
    : name_(std::move(name)), kind_(kind), count_(count), front_(kAlignment + shift) {
  const int64_t behind = tally.tight ? 0 : kGuard;
  bytes_.assign(static_cast<size_t>(front_ + count * kBytesOf[kind] + behind), kGuardByte);
  std::memset(bytes_.data() + front_, 0, static_cast<size_t>(count * kBytesOf[kind]));
  succeed(cudaMalloc(reinterpret_cast<void**>(&device_), bytes_.size()), "cudaMalloc");
}

Array::Array(Array&& other) noexcept
    : name_(std::move(other.name_)),
      kind_(other.kind_),
      count_(other.count_),
      front_(other.front_),
      bytes_(std::move(other.bytes_)),
      device_(other.device_) {
  other.device_ = nullptr;
}

Array::~Array() {
  if (device_ != nullptr) succeed(cudaFree(device_), "cudaFree");
}

void Array::upload() { succeed(cudaMemcpy(device_, bytes_.data(), bytes_.size(), cudaMemcpyHostToDevice), "upload"); }

void Array::compare(double tolerance) {
  std::vector<char> found(bytes_.size());
  succeed(cudaMemcpy(found.data(), device_, found.size(), cudaMemcpyDeviceToHost), "download");
  const int64_t size = kBytesOf[kind_];
  tally.values += count_;
  for (int64_t i = 0; i < count_; ++i) {
    const char* is = found.data() + front_ + i * size;
    const char* wanted = bytes_.data() + front_ + i * size;
    if (std::memcmp(is, wanted, static_cast<size_t>(size)) == 0 || same(kind_, is, wanted, tolerance)) continue;
    expect(false, name_ + "[" + std::to_string(i) + "] of " + std::to_string(count_) + " is " + text(kind_, is) +
                      ", not " + text(kind_, wanted));
  }
  const auto guard = [&](size_t from, size_t to) {
    return std::memcmp(found.data() + from, bytes_.data() + from, to - from) == 0;
  };
  const size_t end = static_cast<size_t>(front_ + count_ * size);
  expect(guard(0, static_cast<size_t>(front_)), name_ + ": written to before its first element");
  expect(guard(end, bytes_.size()), name_ + ": written to behind its last element");
}

Array::Kind kind_of(DType dtype) { return static_cast<Array::Kind>(dtype); }

const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"fp16", "bf16", "fp32", "fp64"};
  return kNames[static_cast<int>(dtype)];
}

void fill(Array* array, DType dtype, uint32_t seed) {
  std::mt19937 random(seed);
  const int smallest = dtype == DType::kFloat16 ? -24 : -140;  // of its type, or nearly
  for (int64_t i = 0; i < array->count(); ++i) {
    const uint32_t bits = random();
    double value = std::ldexp(static_cast<double>(bits >> 8), -24 + static_cast<int>(bits % 8) - 2);
    if (i % 37 == 5) value = 0.0;
    if (i % 37 == 6) value = std::ldexp(1 + static_cast<double>(bits % 5), smallest);
    reference::put(dtype, bits & 0x80 ? -value : value, array->expected<void>(), i);
  }
}

Array scalar(const char* name, DType dtype, double value) {
  Array array(name, kind_of(dtype), 1);
  reference::put(dtype, value, array.expected<void>(), 0);
  return array;
}

}  // namespace check
