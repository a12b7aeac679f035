// Tensors as the stable ABI hands them out: owned handles, read without allocations; and how messages name them.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <ostream>
#include <sstream>
#include <stdexcept>

namespace accumkernels {

// The exception reaches Python as a RuntimeError of this text.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// A call into torch that fails only where torch is out of memory or broken; torch has printed the cause.
inline void call(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS) fail("accumkernels: ", what, " failed inside torch");
}

// "buffer" or "grads[3]"; put together only for messages.
struct Name {
  const char* op;
  const char* argument;
  int64_t index = -1;
};

inline std::ostream& operator<<(std::ostream& out, const Name& name) {
  out << name.op << ": " << name.argument;
  return name.index < 0 ? out : out << '[' << name.index << ']';
}

struct Device {
  int32_t type;
  int32_t index;

  bool is_cpu() const { return type == kCpu; }
  bool operator!=(const Device& other) const { return type != other.type || (index != other.index && !is_cpu()); }

  static const int32_t kCpu;
  static const int32_t kCuda;
};

inline const int32_t Device::kCpu = aoti_torch_device_type_cpu();
inline const int32_t Device::kCuda = aoti_torch_device_type_cuda();

inline std::ostream& operator<<(std::ostream& out, const Device& device) {
  if (device.is_cpu()) return out << "cpu";
  return out << (device.type == Device::kCuda ? "cuda:" : "device:") << device.index;
}

inline const int32_t kFloat16 = aoti_torch_dtype_float16();
inline const int32_t kBFloat16 = aoti_torch_dtype_bfloat16();
inline const int32_t kFloat32 = aoti_torch_dtype_float32();
inline const int32_t kFloat64 = aoti_torch_dtype_float64();
inline const int32_t kInt32 = aoti_torch_dtype_int32();
inline const int32_t kInt64 = aoti_torch_dtype_int64();

inline const char* dtype_name(int32_t dtype) {
  if (dtype == kFloat16) return "torch.float16";
  if (dtype == kBFloat16) return "torch.bfloat16";
  if (dtype == kFloat32) return "torch.float32";
  if (dtype == kFloat64) return "torch.float64";
  if (dtype == kInt32) return "torch.int32";
  if (dtype == kInt64) return "torch.int64";
  if (dtype == aoti_torch_dtype_bool()) return "torch.bool";
  if (dtype == aoti_torch_dtype_uint8()) return "torch.uint8";
  if (dtype == aoti_torch_dtype_complex64()) return "torch.complex64";
  return "another dtype";
}

// An owned reference to a tensor; reads it without further allocations.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) noexcept : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  explicit operator bool() const { return handle_ != nullptr; }

  int64_t numel() const {
    int64_t numel;
    call(aoti_torch_get_numel(handle_, &numel), "reading a tensor's numel");
    return numel;
  }
  int32_t dtype() const {
    int32_t dtype;
    call(aoti_torch_get_dtype(handle_, &dtype), "reading a tensor's dtype");
    return dtype;
  }
  Device device() const {
    Device device{0, 0};
    call(aoti_torch_get_device_type(handle_, &device.type), "reading a tensor's device");
    if (!device.is_cpu()) call(aoti_torch_get_device_index(handle_, &device.index), "reading a tensor's device");
    return device;
  }
  bool is_contiguous() const {
    bool contiguous;
    call(aoti_torch_is_contiguous(handle_, &contiguous), "reading a tensor's strides");
    return contiguous;
  }
  bool is_dense() const;
  int64_t rows() const;

  const void* data() const {
    const void* data;
    call(torch_get_const_data_ptr(handle_, &data), "reading a tensor's address");
    return data;
  }
  void* mutable_data() const {
    void* data;
    call(torch_get_mutable_data_ptr(handle_, &data), "reading a tensor's address");
    return data;
  }

 private:
  AtenTensorHandle handle_;
};

// Non-overlapping and dense: in some order of the dimensions the tensor is contiguous.
inline bool Tensor::is_dense() const {
  if (is_contiguous()) return true;
  int64_t dim, *sizes, *strides;
  call(aoti_torch_get_dim(handle_, &dim), "reading a tensor's shape");
  call(aoti_torch_get_sizes(handle_, &sizes), "reading a tensor's shape");
  call(aoti_torch_get_strides(handle_, &strides), "reading a tensor's strides");
  int64_t expected = 1;
  for (int64_t remaining = numel(); expected < remaining;) {  // each turn finds the dimension of stride `expected`
    int64_t d = 0;
    while (d < dim && (strides[d] != expected || sizes[d] == 1)) ++d;
    if (d == dim) return false;
    expected *= sizes[d];
  }
  return true;
}

// Rows of a matrix of two columns, -1 for any other shape.
inline int64_t Tensor::rows() const {
  int64_t dim, *sizes;
  call(aoti_torch_get_dim(handle_, &dim), "reading a tensor's shape");
  call(aoti_torch_get_sizes(handle_, &sizes), "reading a tensor's shape");
  return dim == 2 && sizes[1] == 2 ? sizes[0] : -1;
}

}  // namespace accumkernels
