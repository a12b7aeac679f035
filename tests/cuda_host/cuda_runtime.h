// The part of the CUDA runtime that csrc/cuda uses, in plain C++, so that the very same .cu files compile with g++ and
// run under the sanitizers. For tests only: found in place of the toolkit's header because its folder comes first.
//
// A launch runs at once; the threads of a block are fibers that change hands at barriers and shuffles (see
// emulator.cpp). Blocks run one after the other, or with CUDA_HOST_RACES on two threads of the host, under
// ThreadSanitizer, which sees what no barrier orders.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#ifndef CUDART_VERSION
#define CUDART_VERSION 13000
#endif

#define __global__
#define __device__
#define __host__
#ifdef CUDA_HOST_RACES
#define CUDA_HOST_LOCAL thread_local  // of one of the host's threads, which runs one block at a time
#else
#define CUDA_HOST_LOCAL
#endif
#define __shared__ static CUDA_HOST_LOCAL
#define __launch_bounds__(...)
#define __grid_constant__ &  // written behind the type: a launch's threads share one constant copy here too

struct dim3 {
  unsigned x, y, z;
  constexpr explicit dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(8) uint2 {
  unsigned x, y;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline CUDA_HOST_LOCAL dim3 threadIdx, blockIdx, blockDim, gridDim;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorUnsupportedPtxVersion = 222,
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
struct cudaFuncAttributes {
  int numRegs;
};
using cudaStream_t = struct CUstream_st*;

namespace cuda_host {

inline uint64_t seed_from_environment() {
  const char* seed = std::getenv("CUDA_HOST_SEED");
  return seed == nullptr ? 0 : std::strtoull(seed, nullptr, 10);
}

// What tests set, and what they read.
struct Settings {
  uint64_t seed = seed_from_environment();  // of the order of blocks and threads: shows a missing barrier; 0: ascending
  int64_t last_blocks = 0;                  // run only this many blocks at the end of every grid; 0: all
  int processors = 2;                       // multiprocessors of a GPU
  int driver_version = 13000;
  int device_count = 2;
  unsigned contexts = 0;                  // a bit for each device that has one
  cudaError_t image_error = cudaSuccess;  // what cudaFuncGetAttributes answers on device 1
};
inline Settings settings;
inline thread_local int current_device = 0;
inline int64_t launches = 0;
inline int64_t largest_arguments = 0;  // bytes of the arguments of the largest launch so far

void run_grid(dim3 grid, dim3 block, const std::function<void()>& kernel);
void block_barrier();

// What a lane shows to others in a shuffle.
struct alignas(16) Value {
  char bytes[16];
};

// Every lane in `mask` shows a value and takes that of one lane.
Value exchange(unsigned mask, const Value& mine, unsigned source_lane);

template <class... Parameters, size_t... kIndex>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<kIndex...>) {
  kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[kIndex])...);
}

}  // namespace cuda_host

template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments, size_t,
                             cudaStream_t) {
  if (grid.x == 0 || grid.x > 0x7fffffffu || block.x == 0 || block.x > 1024) return cudaErrorInvalidValue;
  const int64_t bytes = static_cast<int64_t>((sizeof(std::remove_reference_t<Parameters>) + ...));
  if (bytes > cuda_host::largest_arguments) cuda_host::largest_arguments = bytes;
  cuda_host::run_grid(grid, block,
                      [&] { cuda_host::call(kernel, arguments, std::index_sequence_for<Parameters...>()); });
  return cudaSuccess;
}

inline void __syncthreads() { cuda_host::block_barrier(); }

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  cuda_host::Value shown{};
  static_assert(sizeof(T) <= sizeof(shown));
  memcpy(&shown, &value, sizeof(T));
  shown = cuda_host::exchange(mask, shown, lane + distance < 32 ? lane + distance : lane);
  memcpy(&value, &shown, sizeof(T));
  return value;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __ddiv_rn(double a, double b) { return a / b; }

template <class T>
T __ldca(const T* from) {
  return *from;
}

template <class T>
void __stwb(T* to, T value) {
  *to = value;
}

inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = cuda_host::settings.driver_version;
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = cuda_host::current_device;
  return cuda_host::settings.device_count > 0 ? cudaSuccess : cudaErrorNoDevice;
}

// Since CUDA 12.0 it creates the device's context.
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= cuda_host::settings.device_count) return cudaErrorInvalidDevice;
  cuda_host::current_device = device;
  cuda_host::settings.contexts |= 1u << device;
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  *attributes = {};
  return cuda_host::current_device == 1 ? cuda_host::settings.image_error : cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 7
           : attribute == cudaDevAttrMultiProcessorCount  ? cuda_host::settings.processors
                                                          : 0;
  return cudaSuccess;
}

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = cuda_host::settings.device_count;
  return cudaSuccess;
}

inline cudaError_t cudaMalloc(void** pointer, size_t size) {
  *pointer = std::aligned_alloc(256, (size + 255) / 256 * 256);
  return cudaSuccess;
}

inline cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  memcpy(to, from, size);
  return cudaSuccess;
}

// A launch is over when it returns: an event is the time of its record.
using cudaEvent_t = std::chrono::steady_clock::time_point*;

inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new std::chrono::steady_clock::time_point;
  return cudaSuccess;
}

inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *event = std::chrono::steady_clock::now();
  return cudaSuccess;
}

inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  *milliseconds = std::chrono::duration<float, std::milli>(*stop - *start).count();
  return cudaSuccess;
}

inline const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice ? "cudaErrorNoKernelImageForDevice" : "cudaError";
}

inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
