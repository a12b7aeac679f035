// What the checks of tests/cuda_device are made of: device memory that is watched, and a count of what was compared.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "../../csrc/core/args.h"

namespace check {

using accumkernels::DType;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// One line of the list.
struct Check {
  const char* name;  // OP/WHAT
  const char* what;
  void (*run)();
};

extern const std::vector<Check> kAccumulate, kCheckFinite, kNorm, kScaledCopy, kDecide;

struct Tally {
  int64_t values = 0;    // compared
  int64_t failures = 0;  // of which the first few are shown
  bool tight = false;    // no guard bytes behind an array, so that compute-sanitizer sees every access past its end
};
extern Tally tally;

// A failure says what it saw.
void expect(bool holds, const std::string& what);

// The program ends with the error's name: after most of them no further call works.
void succeed(int error, const char* what);

// An array that the reference and the device both work on, each on its own copy.
//
// `expected` is what the reference makes of it; compare() then holds the device's copy to it, guard bytes on both sides
// included: bit for bit, but that any NaN equals any other, or with a tolerance of so much of the value.
class Array {
 public:
  enum Kind { kFloat16, kBFloat16, kFloat32, kFloat64, kInt32, kInt64 };  // floats in the order of DType

  // `count` zeros, `shift` bytes past an address that is a multiple of 256.
  Array(std::string name, Kind kind, int64_t count, int64_t shift = 0);
  ~Array();
  Array(Array&& other) noexcept;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  template <class T>
  T* expected() {
    return reinterpret_cast<T*>(bytes_.data() + front_);
  }
  template <class T>
  T* device() const {
    return reinterpret_cast<T*>(device_ + front_);
  }
  int64_t count() const { return count_; }

  // Copies `expected` to the device.
  void upload();
  void compare(double tolerance = 0.0);

 private:
  std::string name_;
  Kind kind_;
  int64_t count_;
  int64_t front_;  // bytes of guard before the first element
  std::vector<char> bytes_;
  char* device_ = nullptr;
};

Array::Kind kind_of(DType dtype);
const char* name_of(DType dtype);
constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

// Around every boundary of a thread's group of elements, a block's stripes and a block's piece.
constexpr int64_t kSizes[] = {1,    2,    3,    4,    5,    7,    8,    9,    31,   255,  256,   257,
                              1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 8191, 12345, 12288};

// Finite values of many magnitudes, zeros of both signs and subnormal numbers among them.
void fill(Array* array, DType dtype, uint32_t seed);

// An array of one floating-point number.
Array scalar(const char* name, DType dtype, double value);

}  // namespace check
