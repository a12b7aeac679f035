#include "guard.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>

#include "capture.h"
#include "clock.h"
#include "memory.h"

namespace sim {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
thread_local int device_now = 0;
thread_local std::array<int, kDevices> streams_now = {};
std::array<int, kDevices> streams_made = {};

c10::Stream make_stream(int device, int id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(device)), id);
}

void check(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "there is no device sim:", device, ", only ", kDevices, " of them");
}

int or_current(c10::Device device) { return device.has_index() ? device.index() : device_now; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override { return c10::Device(kType, static_cast<c10::DeviceIndex>(device_now)); }
  void setDevice(c10::Device device) const override {
    check(device.index());
    device_now = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) device_now = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(or_current(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return make_stream(or_current(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const int index = or_current(device);
    check(index);
    std::lock_guard<std::mutex> guard(lock());
    return make_stream(index, 1 + streams_made[index]++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    streams_now[stream.device_index()] = static_cast<int>(stream.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const {  // not in every torch
    return reinterpret_cast<void*>(
        static_cast<uintptr_t>(stream.id() ? number(stream) : 0));  // as CUDA's default streams
  }

  void record(void** slot, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::mutex> guard(lock());
    if (!*slot) *slot = new Event;
    Event& event = *static_cast<Event*>(*slot);
    event.clock = now(number(stream));
    event.recorded = true;
    event.queries = 0;
    event.launch = launches();
    event.stream = number(stream);
    event.capture = capture_of(number(stream));
  }
  void block(void* slot, const c10::Stream& stream) const override {
    if (!slot) return;
    const Event& event = *static_cast<Event*>(slot);
    std::lock_guard<std::mutex> guard(lock());
    if (!event.recorded) return;
    capture_wait(number(stream), event);
    join(now(number(stream)), event.clock);
  }
  bool queryEvent(void* slot) const override {
    if (!slot) return true;
    Event& event = *static_cast<Event*>(slot);
    if (!event.recorded) return true;
    refuse_captured(event);
    return query(event.clock, event.queries, event.stream);
  }
  void destroyEvent(void* slot, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(slot); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from && to, "both events must be recorded");
    const double launched = static_cast<double>(static_cast<Event*>(to)->launch) - static_cast<Event*>(from)->launch;
    return launched * 0.01;  // ms
  }

  bool queryStream(const c10::Stream& stream) const override {
    static std::array<int, kDevices * kStreams> asked = {};
    return query(known(number(stream)), asked[number(stream)], number(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait(known(number(stream)), "Stream.synchronize", number(stream));
  }
  void synchronizeEvent(void* slot) const override {
    if (!slot || !static_cast<Event*>(slot)->recorded) return;
    const Event& event = *static_cast<Event*>(slot);
    refuse_captured(event);
    wait(event.clock, "Event.synchronize", event.stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Clock until;
    {
      std::lock_guard<std::mutex> guard(lock());
      until = all(device < 0 ? device_now : device);
    }
    wait(until, "synchronize", -1);
  }
  bool isStreamCapturing(const c10::Stream& stream) const {  // not in torch 2.10
    std::lock_guard<std::mutex> guard(lock());
    return capture_of(number(stream)) != 0;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator()->recordStream(data, stream);
  }

 private:
  static Clock known(int stream) {
    std::lock_guard<std::mutex> guard(lock());
    return now(stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Numbers come from a generator of the CPU of its own, so that the CPU's are left alone.
struct Generator final : c10::GeneratorImpl {
  Generator(int device, at::Generator inner)
      : c10::GeneratorImpl(c10::Device(kType, static_cast<c10::DeviceIndex>(device)),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a simulated device's generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "a simulated device's generator has no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), inner.clone()); }

  at::Generator inner;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(device_now); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    check(device);
    device_now = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(device_of(data) >= 0, "not memory of a simulated device");
    return c10::Device(kType, static_cast<c10::DeviceIndex>(device_of(data)));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static std::array<at::Generator, kDevices> generators = {getNewGenerator(0), getNewGenerator(1)};
    const int index = device < 0 ? device_now : device;
    check(index);
    return generators[index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? device_now : device, at::detail::createCPUGenerator());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DataPtr fresh = device_allocator()->allocate(bytes);
    if (bytes && impl->nbytes()) {
      device_allocator()->copy_data(fresh.get(), impl->data(), std::min(bytes, impl->nbytes()));
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

Hooks the_hooks;
[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(&the_hooks), true);

}  // namespace

int current_device() { return device_now; }

c10::Stream current_stream(int device) {
  check(device);
  return make_stream(device, streams_now[device]);
}

at::Generator default_generator(int device) {
  return the_hooks.getDefaultGenerator(static_cast<c10::DeviceIndex>(device));
}

at::Generator inner_generator(const at::Generator& generator) {
  const auto* of_device = dynamic_cast<const Generator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(of_device, "expected a generator of a simulated device, got one of ", generator.device());
  return of_device->inner;
}

}  // namespace sim
