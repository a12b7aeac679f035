// Can this device run the library at all?
#include <cstdio>
#include <thread>

#include "../core/args.h"
#include "table.h"

namespace accumkernels::cuda {
namespace {

// Never launched: stands for all kernels of the library, which are compiled for the same architectures.
__global__ void probe_kernel() {}

// The oldest driver for the runtime that is linked in, as the CUDA version it reports and by its release name.
constexpr int kMinDriver = CUDART_VERSION >= 13000 ? 13000 : CUDART_VERSION >= 12010 ? 12010 : 12000;
constexpr const char* kMinDriverName = CUDART_VERSION >= 13000 ? "R580" : CUDART_VERSION >= 12010 ? "R530" : "R525";

// In a thread of its own, since making a device the current one creates a context on it: to go back to the device that
// was current would take memory on a GPU that nobody may be using.
cudaError_t find_image(int device) {
  cudaError_t error = cudaSuccess;
  std::thread([&] {
    error = cudaSetDevice(device);
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, probe_kernel);
    cudaGetLastError();  // the runtime would report it again at the thread's next launch
  }).join();
  return error;
}

}  // namespace

int64_t workspace_size() { return 2 * kMaxBlocks; }  // accumulate has two sums per block

int probe(int device, char* message, int size) {
  int driver = 0;
  cudaError_t error = cudaDriverGetVersion(&driver);
  if (error == cudaSuccess && driver < kMinDriver) {
    if (driver == 0) {
      snprintf(message, size, "no NVIDIA driver found; this build needs %s or newer", kMinDriverName);
    } else {
      snprintf(message, size, "the driver supports CUDA %d.%d; this build needs %d.%d (driver %s or newer)",
               driver / 1000, driver % 1000 / 10, kMinDriver / 1000, kMinDriver % 1000 / 10, kMinDriverName);
    }
    return cudaErrorInsufficientDriver;
  }
  if (error == cudaSuccess) error = find_image(device);
  if (error == cudaSuccess) {
    snprintf(message, size, "ok");
    return cudaSuccess;
  }
  int major = 0;
  int minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorUnsupportedPtxVersion) {
    snprintf(message, size, "this build has no kernel image for sm_%d%d (%s)", major, minor, cudaGetErrorName(error));
  } else {
    snprintf(message, size, "%s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
  }
  cudaGetLastError();  // the runtime would report it again at the next launch
  return error;
}

}  // namespace accumkernels::cuda
