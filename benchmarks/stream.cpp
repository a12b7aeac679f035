// The memory limit of an accumulation: a loop that does nothing but read 2 + 4 bytes and write 4 per element, as plain
// as the compiler takes it, on contiguous arrays split evenly over threads.
#include <cstdint>
#include <thread>
#include <vector>

extern "C" void stream_6_to_4(float* __restrict accumulator, const uint16_t* __restrict gradient, int64_t n,
                              int threads) {
  const auto part = [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) accumulator[i] += static_cast<float>(gradient[i]);
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(part, n * t / threads, n * (t + 1) / threads);
  part(0, n / threads);
  for (std::thread& other : others) other.join();
}
