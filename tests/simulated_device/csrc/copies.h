// Copies between host and devices, which the host must wait for before it reads what came or changes what goes.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "clock.h"

namespace sim {

// A copy that the host has not waited for.
struct Delivery {
  at::Tensor on_host;  // the destination, or the source of a copy to a device
  at::Tensor value;    // what it will get, or had when the copy was launched
  bool to_host = true;
  Access access;
};

std::vector<Delivery> take_ended(const Clock& host);  // with the lock held
void deliver(Delivery& delivery);                     // without

}  // namespace sim
