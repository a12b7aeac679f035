// Graphs: what captured streams may do, and what a replay launches again. Kernels run during a capture, too, because
// they alone know the shapes of their results; at its end everything they have written is taken back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "clock.h"
#include "races.h"

namespace sim {

struct Touched {
  std::vector<Range> ranges;
  bool write;
};

// Runs a kernel. It must find its arguments without keeping them alive, as a graph holds addresses.
using Body = std::function<void(const Access& access, const Clock& known)>;

struct Recorded {
  const char* name;
  std::vector<Touched> touched;
  std::vector<std::pair<uintptr_t, uint64_t>> owners;  // of each block: an address, and the launch that allocated it
  Body body;
};

// Bytes that a capture has written, although they are older.
struct Before {
  uintptr_t address;
  uint64_t owner;
  at::Tensor view, value;
};

struct Capture {
  uint64_t id;
  int origin;  // the stream that began it
  bool only_own_thread, relaxed;
  std::thread::id thread;
  std::set<int> streams;  // the origin, and those that waited for it
  std::map<uintptr_t, History> histories;
  std::vector<Recorded> launches;
  std::vector<Before> before;
  std::vector<at::Tensor> random;  // the states of all devices' generators when it began
  std::set<uintptr_t> memory;      // allocated meanwhile, which nobody else gets while the graph lives
  const char* broken = nullptr;
};

// Without the lock: an error where a capture forbids to wait for a stream, or for a device (-1).
void refuse_in_capture(const char* what, int stream);
void refuse_captured(const Event& event);

void remember(Capture& capture, const at::Tensor& tensor, const at::Tensor& view);  // before it is written

// With the lock held.
Capture* capturing(int stream);
uint64_t capture_of(int stream);                    // 0: none
void capture_wait(int stream, const Event& event);  // before the stream waits for the event
void touch(Capture* capture, const std::vector<Touched>& touched, const Access& access);  // or of what runs, if null
void record(Capture& capture, const char* name, std::vector<Touched> touched, Body body);
bool kept_by_graph(uintptr_t address);  // a block that is freed, but stays as it is: a graph will use it again

}  // namespace sim
