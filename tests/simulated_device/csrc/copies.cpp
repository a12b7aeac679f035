#include "copies.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <cstring>
#include <limits>

#include "capture.h"
#include "guard.h"
#include "memory.h"
#include "tensors.h"

namespace sim {
namespace {

std::vector<Delivery> underway;  // in the order of their launches

void poison(const at::Tensor& tensor) {
  const bool floating = tensor.is_floating_point() || tensor.is_complex();
  if (floating) {
    tensor.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    tensor.fill_(tensor.scalar_type() == at::kBool ? 1 : -1);
  }
}

bool overlap(const at::Tensor& a, const at::Tensor& b) { return a.storage().is_alias_of(b.storage()); }

// What a copy from the host reads on the device's side: bytes that are still on their way to the host have arrived
// there.
at::Tensor arrived(const at::Tensor& source, const Clock& known) {
  std::vector<Delivery> before;
  {
    std::lock_guard<std::mutex> guard(lock());
    for (const Delivery& delivery : underway) {
      if (delivery.to_host && overlap(delivery.on_host, source) &&
          covers(known, delivery.access.stream, delivery.access.time)) {
        before.push_back(delivery);
      }
    }
  }
  for (const Delivery& delivery : before) delivery.on_host.copy_(delivery.value);
  at::Tensor value = source.clone();
  for (const Delivery& delivery : before) poison(delivery.on_host);
  return value;
}

// Launches a copy, or records it. Returns what is known to have ended when the copy has.
Clock start(int stream, const char* name, const at::Tensor& source, const at::Tensor& destination, const Body& body) {
  std::vector<Touched> touched = {{ranges_of(source), false}, {ranges_of(destination), true}};
  Access access;
  Clock known;
  Capture* capture;
  {
    std::lock_guard<std::mutex> guard(lock());
    access = launch(stream, name);
    known = now(stream);
    capture = capturing(stream);
    touch(capture, touched, access);
    if (capture) record(*capture, name, std::move(touched), body);
  }
  if (!capture) {
    body(access, known);
  } else if (on_device(destination)) {
    const at::Tensor to = host_view(destination);
    remember(*capture, destination, to);
    to.copy_(on_device(source) ? host_view(source) : source);
  }
  return known;
}

void order(int before, int after) {
  std::lock_guard<std::mutex> guard(lock());
  join(now(after), now(before));
}

void to_device(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  const char* name = "a copy from the host";
  const int stream = number(current_stream(destination.device().index()));
  if (!non_blocking) refuse_in_capture(name, stream);
  const bool staged = !non_blocking || !is_pinned(source.storage().data_ptr().get());  // read before the call returns
  const at::Tensor to = host_view(destination);
  const Clock known = start(stream, name, source, destination, [=](const Access& access, const Clock& known) {
    const at::Tensor value = arrived(source, known);
    to.copy_(value);
    std::lock_guard<std::mutex> guard(lock());
    if (!staged) underway.push_back({source, value, false, access});
  });
  if (!non_blocking) wait(known, name, stream);
}

void to_host(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  const char* name = "a copy to the host";
  const int stream = number(current_stream(source.device().index()));
  if (!non_blocking) refuse_in_capture(name, stream);
  const at::Tensor from = host_view(source);
  const Clock known = start(stream, name, source, destination, [=](const Access& access, const Clock&) {
    const at::Tensor value = from.to(destination.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    poison(destination);
    std::lock_guard<std::mutex> guard(lock());
    underway.push_back({destination, value.expand(destination.sizes()), true, access});
  });
  if (!non_blocking) wait(known, name, stream);
}

// As CUDA does it: on the stream of the source's device, after and before the other device's stream.
void between(const at::Tensor& source, const at::Tensor& destination) {
  const int stream = number(current_stream(source.device().index()));
  const int other = number(current_stream(destination.device().index()));
  const at::Tensor from = host_view(source), to = host_view(destination);
  order(other, stream);
  start(stream, "a copy", source, destination, [=](const Access&, const Clock&) { to.copy_(from); });
  order(stream, other);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (self.numel() == 0) return destination;
  if (on_launch) on_launch("a copy");
  if (!on_device(self)) {
    to_device(self, destination, non_blocking);
  } else if (!on_device(destination)) {
    to_host(self, destination, non_blocking);
  } else {
    between(self, destination);
  }
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}

}  // namespace

std::vector<Delivery> take_ended(const Clock& host) {
  std::vector<Delivery> ended, rest;
  for (Delivery& delivery : underway) {
    (covers(host, delivery.access.stream, delivery.access.time) ? ended : rest).push_back(std::move(delivery));
  }
  underway = std::move(rest);
  return ended;
}

void deliver(Delivery& delivery) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (delivery.to_host) {
    delivery.on_host.copy_(delivery.value);
    return;
  }
  const at::Tensor is = delivery.on_host.contiguous(), was = delivery.value.contiguous();
  if (memcmp(is.const_data_ptr(), was.const_data_ptr(), was.nbytes()) != 0) {
    report("host", "the host changed pinned memory that " + describe(delivery.access) + " may not have read yet");
  }
}

}  // namespace sim
