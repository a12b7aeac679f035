// A tensor of a device as kernels of the CPU take it: the same bytes at addresses that can be read.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "races.h"

namespace sim {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// The same bytes, shape and strides, as a tensor of the CPU; it keeps nothing alive.
at::Tensor host_view(const at::Tensor& tensor);

// The bytes of a tensor, of a device or the host. Without gaps where it has at most some thousand rows.
std::vector<Range> ranges_of(const at::Tensor& tensor);

at::Tensor empty_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
void grow(const at::Tensor& tensor, size_t bytes);  // gives the storage room for so many bytes

}  // namespace sim
