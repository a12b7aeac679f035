// The devices' memory, and pinned memory of the host. Each device's bytes are mapped twice: at the addresses that
// tensors have they can be neither read nor written, so that the host cannot touch them by accident; kernels use the
// other ones.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <cstdint>

namespace sim {

constexpr unsigned char kPoison = 0xff;  // NaN in every floating point type, -1 in every integer

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();

int device_of(const void* pointer);      // -1: host memory
void* for_kernels(const void* pointer);  // where kernels find what a device pointer points to
bool is_pinned(const void* pointer);
void poison(uintptr_t address);        // a block in use
void release_kept(uintptr_t address);  // a graph that kept it is gone

void set_limit(int device, size_t bytes);
void fail_after(int device, int64_t allocations);  // the allocation after so many runs out of memory, once; -1: none

}  // namespace sim
