// Time on the simulated devices. Kernels run at once, in the order in which the host launches them; what a real device
// would be free to reorder is kept in vector clocks: one counter per stream, as in race detectors for threads.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

constexpr int kDevices = 2;
constexpr int kStreams = 128;  // of each device, default stream included; further ones share them, as CUDA's pool of 32
constexpr int kQueries = 3;  // a query answers "done" when it is asked so often: sooner than a device, later than never

// One entry per stream of all devices: the number of its launches that are known to have ended.
using Clock = std::vector<uint64_t>;

inline int number(const c10::Stream& stream) {
  return stream.device_index() * kStreams + static_cast<int>(stream.id());
}

void join(Clock& into, const Clock& other);
bool covers(const Clock& clock, int stream, uint64_t time);

// What a launch leaves behind where it reads or writes. The strings are never freed.
struct Access {
  int stream = 0;
  uint64_t time = 0;
  uint64_t launch = 0;  // the how manieth of the process
  const char* name = "";
  const char* where = "";  // the line of Python, if lines are recorded
};

std::string describe(const Access& access);
const char* intern(const std::string& text);

struct Event {
  Clock clock;
  bool recorded = false;
  int queries = 0;
  int stream = 0;
  uint64_t launch = 0;   // when it was recorded, for elapsed times
  uint64_t capture = 0;  // the capture it was recorded in; 0: none
};

// Guards all that follows and the tables of memory. Never held while a kernel or Python runs.
std::mutex& lock();

// With the lock held.
Access launch(int stream,
              const char* name);  // the stream's next launch, which comes after all that the host waited for
Clock& now(int stream);           // what is known to have ended when the stream's next launch starts
const Clock& host();              // what the host waited for
Clock all(int device);            // all that was launched on a device; -1: on all of them
uint64_t launches();

// Without the lock. Each counts as one wait, and delivers the copies to the host that it covers. `stream` is what is
// waited for, -1: all of a device; captures forbid it.
void wait(const Clock& until, const char* what, int stream);
bool query(const Clock& until, int& asked, int stream);
void restart();  // the host waits for everything; nobody counts it

// Called at each wait, and at each launch if lines are recorded; from Python, hence without the lock.
using Callback = void (*)(const char* what);
extern Callback on_wait;
extern Callback on_launch;
extern thread_local const char* where;  // set by `on_launch`

}  // namespace sim
