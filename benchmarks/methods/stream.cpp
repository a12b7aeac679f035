// The memory limit of an accumulation: a loop that does nothing but read a gradient and an accumulator and write the
// accumulator, as plain as the compiler takes it, on contiguous arrays split evenly over threads.
#include <cstdint>
#include <thread>
#include <vector>

namespace {

template <class Gradient>
void stream(float* __restrict accumulator, const Gradient* __restrict gradient, int64_t n, int threads) {
  const auto part = [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) accumulator[i] += static_cast<float>(gradient[i]);
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(part, n * t / threads, n * (t + 1) / threads);
  part(0, n / threads);
  for (std::thread& other : others) other.join();
}

}  // namespace

extern "C" void stream_2(float* accumulator, const uint16_t* gradient, int64_t n, int threads) {
  stream(accumulator, gradient, n, threads);
}

extern "C" void stream_4(float* accumulator, const float* gradient, int64_t n, int threads) {
  stream(accumulator, gradient, n, threads);
}
