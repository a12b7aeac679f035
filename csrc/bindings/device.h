// Where an op runs: on torch's threads, or on the current stream of a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "tensor.h"
#ifdef ACCUMKERNELS_WITH_CUDA
#include "../core/args.h"

// Not in the libtorch of a CPU-only torch, where nothing calls them: weak, so that the library loads there too.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);
__attribute__((weak)) AOTITorchError torch_c10_cuda_check_msg(int32_t, const char*, const char*, uint32_t, bool,
                                                              char**);
__attribute__((weak)) void torch_c10_cuda_free_error_msg(char*);
}
#endif

namespace accumkernels {

inline void parallel_for(int64_t end, void (*function)(int64_t, int64_t, void*), void* context) {
  call(torch_parallel_for(0, end, 1, function, context), "parallel_for");
}

#ifdef ACCUMKERNELS_WITH_CUDA
// Makes a device and its current stream the place of what follows.
class CudaScope {
 public:
  CudaScope(const char* op, const Device& device) : op_(op), device_(device) {
    call(aoti_torch_create_device_guard(device.index, &guard_), "switching the device");
  }
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;
  ~CudaScope() { aoti_torch_delete_device_guard(guard_); }

  void* stream() const {
    void* stream;
    call(aoti_torch_get_current_cuda_stream(device_.index, &stream), "reading the current stream");
    return stream;
  }

  // From torch's allocator, so that it may be captured in a graph, and freed in the order of the stream.
  Tensor workspace() const {
    const int64_t size = cuda::workspace_size(), stride = 1;
    AtenTensorHandle handle;
    if (aoti_torch_empty_strided(1, &size, &stride, kFloat64, device_.type, device_.index, &handle)) {
      fail(op_, ": CUDA out of memory: no ", size * 8, " bytes of workspace on ", device_);
    }
    return Tensor(handle);
  }

  void check(int error) const {
    if (error == 0) return;
    char* message = nullptr;
    torch_c10_cuda_check_msg(error, "accumkernels", op_, 0, true, &message);
    const std::string text = message ? message : "CUDA error " + std::to_string(error);
    if (message) torch_c10_cuda_free_error_msg(message);
    fail(op_, ": ", text);
  }

 private:
  const char* op_;
  Device device_;
  DeviceGuardHandle guard_;
};
#endif

}  // namespace accumkernels
