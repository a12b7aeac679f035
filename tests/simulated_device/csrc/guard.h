// What torch asks a backend for: the current device, streams, events, random numbers.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>

namespace sim {

int current_device();
c10::Stream current_stream(int device);

at::Generator default_generator(int device);
at::Generator inner_generator(const at::Generator& generator);  // what kernels draw from, on the CPU

}  // namespace sim
