#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <numeric>

#include "memory.h"

namespace sim {
namespace {

constexpr size_t kRows = 4096;
void nothing(void*) {}

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  void* data = storage->data_ptr().get() ? for_kernels(storage->data_ptr().get()) : nullptr;
  c10::Storage same(c10::Storage::use_byte_size_t(), storage->nbytes(), c10::DataPtr(data, data, &nothing, c10::kCPU),
                    c10::GetCPUAllocator(), /*resizable=*/true);
  auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                       tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

std::vector<Range> ranges_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.storage().data_ptr().get()) return {};
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size, in bytes and elements
  const auto item = static_cast<int64_t>(tensor.itemsize());
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) != 0) dims.emplace_back(tensor.stride(i) * item, tensor.size(i));
  }
  std::sort(dims.begin(), dims.end());
  int64_t run = item;  // bytes without a gap
  size_t inner = 0;
  while (inner < dims.size() && dims[inner].first <= run) {
    run = dims[inner].first * (dims[inner].second - 1) + run;
    ++inner;
  }
  const auto* storage = static_cast<const char*>(tensor.storage().data_ptr().get());
  const auto begin = reinterpret_cast<uintptr_t>(storage) + static_cast<uintptr_t>(tensor.storage_offset() * item);
  std::vector<uintptr_t> starts = {begin};
  for (size_t i = inner; i < dims.size(); ++i) {
    const size_t before = starts.size();
    if (before * static_cast<size_t>(dims[i].second) > kRows) {  // too many rows: from the first to the last
      int64_t last = 0;
      for (size_t j = i; j < dims.size(); ++j) last += dims[j].first * (dims[j].second - 1);
      return {{begin, starts.back() + static_cast<uintptr_t>(last + run)}};
    }
    for (int64_t k = 1; k < dims[i].second; ++k) {
      for (size_t j = 0; j < before; ++j) starts.push_back(starts[j] + static_cast<uintptr_t>(k * dims[i].first));
    }
  }
  std::vector<Range> ranges;
  for (const uintptr_t start : starts) ranges.push_back({start, start + static_cast<uintptr_t>(run)});
  return ranges;
}

at::Tensor empty_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const c10::Device on(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
  const c10::DeviceGuard guard(on);
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

void grow(const at::Tensor& tensor, size_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->nbytes() >= bytes) return;
  const c10::DeviceGuard guard(tensor.device());
  c10::DataPtr fresh = device_allocator()->allocate(bytes);
  if (storage->nbytes()) device_allocator()->copy_data(fresh.get(), storage->data(), storage->nbytes());
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

}  // namespace sim
