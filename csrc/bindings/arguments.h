// The arguments of an op: taken off torch's stack, and checked for what memory safety needs.
#pragma once

#include <vector>

#include "../core/args.h"
#include "tensor.h"

namespace accumkernels {

// Takes the arguments of an op off its stack, in the order of its schema, which accumkernels/ops/schema.py declares to
// torch. A test holds names, kinds and number to it.
class Arguments {
 public:
  Arguments(const char* op, uint64_t taken, StableIValue* stack, uint64_t size) : next_(stack) {
    if (size != taken) fail(op, ": its schema has ", size, " arguments, the native kernel takes ", taken);
  }

  template <class T>
  T value() {
    return torch::stable::detail::to<T>(*next_++);
  }
  Tensor tensor() { return Tensor(value<AtenTensorHandle>()); }
  Tensor optional_tensor() {
    auto* boxed = value<StableIValue*>();
    if (boxed == nullptr) return Tensor(nullptr);
    Tensor tensor(torch::stable::detail::to<AtenTensorHandle>(*boxed));
    delete boxed;
    return tensor;
  }
  std::vector<Tensor> tensors() { return list<Tensor, AtenTensorHandle>(); }
  std::vector<int64_t> ints() { return list<int64_t, int64_t>(); }
  std::vector<uint8_t> bools() { return list<uint8_t, bool>(); }

 private:
  // The list belongs to us, and so does each tensor in it.
  template <class Element, class Value>
  std::vector<Element> list() {
    const auto handle = value<StableListHandle>();
    size_t size;
    call(torch_list_size(handle, &size), "reading a list");
    std::vector<Element> elements;
    elements.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue element;
      call(torch_list_get_item(handle, i, &element), "reading a list");
      elements.emplace_back(torch::stable::detail::to<Value>(element));
    }
    call(torch_delete_list(handle), "freeing a list");
    return elements;
  }

  StableIValue* next_;
};

inline void check_device(const Name& name, const Tensor& tensor, const Device& expected) {
  const Device device = tensor.device();
  if (device != expected) fail(name, " is on ", device, ", expected ", expected, " as the other tensors");
}

inline void check(const Name& name, const Tensor& tensor, int32_t dtype, const Device& device) {
  check_device(name, tensor, device);
  if (tensor.dtype() != dtype) fail(name, " is ", dtype_name(tensor.dtype()), ", expected ", dtype_name(dtype));
}

// A contiguous tensor of at least `numel` elements.
inline void check_array(const Name& name, const Tensor& tensor, int32_t dtype, const Device& device, int64_t numel) {
  check(name, tensor, dtype, device);
  if (tensor.numel() < numel) fail(name, " has ", tensor.numel(), " elements, expected at least ", numel);
  if (!tensor.is_contiguous()) fail(name, " is not contiguous");
}

inline void check_scalar(const Name& name, const Tensor& tensor, int32_t dtype, const Device& device) {
  check(name, tensor, dtype, device);
  if (tensor.numel() != 1) fail(name, " has ", tensor.numel(), " elements, expected 1");
}

inline const double* optional_scalar(const Name& name, const Tensor& tensor, const Device& device) {
  if (!tensor) return nullptr;
  check_scalar(name, tensor, kFloat64, device);
  return static_cast<const double*>(tensor.data());
}

inline double* mutable_scalar(const Name& name, const Tensor& tensor, const Device& device) {
  if (!tensor) return nullptr;
  check_scalar(name, tensor, kFloat64, device);
  return static_cast<double*>(tensor.mutable_data());
}

inline void check_length(const char* op, const char* argument, size_t length, const char* other, size_t expected) {
  if (length != expected) {
    fail(op, ": ", argument, " has ", length, " elements, expected ", expected, " as ", other);
  }
}

// The element type of a dense floating-point tensor on the device; `contiguous`: its indices are in memory order.
inline DType check_dense(const Name& name, const Tensor& tensor, const Device& device, bool contiguous = false) {
  check_device(name, tensor, device);
  if (contiguous && !tensor.is_contiguous()) fail(name, " is not contiguous");
  if (!contiguous && !tensor.is_dense()) fail(name, " is not dense: its strides overlap or leave gaps");
  const int32_t dtype = tensor.dtype();
  if (dtype == kFloat16) return DType::kFloat16;
  if (dtype == kBFloat16) return DType::kBFloat16;
  if (dtype == kFloat32) return DType::kFloat32;
  if (dtype == kFloat64) return DType::kFloat64;
  fail(name, " is ", dtype_name(dtype), ", expected torch.float16, torch.bfloat16, torch.float32 or torch.float64");
}

inline void check_segment(const char* op, int64_t index, int64_t segment, int64_t segments) {
  if (segment < 0 || segment >= segments) {
    fail(Name{op, "segments", index}, " is ", segment, ", expected 0 to ", segments - 1);
  }
}

// Two gradients of one segment would be added by two threads at once.
inline void check_distinct(const char* op, const std::vector<int64_t>& ids, int64_t segments) {
  bool ascending = true, descending = true;  // what callers send
  for (size_t i = 1; i < ids.size(); ++i) {
    ascending &= ids[i - 1] < ids[i];
    descending &= ids[i - 1] > ids[i];
  }
  if (ascending || descending) return;
  std::vector<bool> seen(segments);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (seen[ids[i]]) fail(Name{op, "segments", static_cast<int64_t>(i)}, " repeats segment ", ids[i]);
    seen[ids[i]] = true;
  }
}

}  // namespace accumkernels
