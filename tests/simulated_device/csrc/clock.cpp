#include "clock.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <unordered_set>

#include "capture.h"
#include "copies.h"

namespace sim {

Callback on_wait = nullptr;
Callback on_launch = nullptr;
thread_local const char* where = "";

namespace {

Clock known_to_host(kDevices* kStreams);
std::vector<Clock> streams(kDevices* kStreams, Clock(kDevices* kStreams));
uint64_t launched = 0;

void host_knows(const Clock& until) {
  std::vector<Delivery> ended;
  {
    std::lock_guard<std::mutex> guard(lock());
    join(known_to_host, until);
    ended = take_ended(known_to_host);
  }
  for (Delivery& delivery : ended) deliver(delivery);
}

bool host_knew(const Clock& until) {
  std::lock_guard<std::mutex> guard(lock());
  for (size_t i = 0; i < until.size(); ++i) {
    if (known_to_host[i] < until[i]) return false;
  }
  return true;
}

}  // namespace

std::mutex& lock() {
  static std::mutex mutex;
  return mutex;
}

void join(Clock& into, const Clock& other) {
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

bool covers(const Clock& clock, int stream, uint64_t time) { return clock[stream] >= time; }

const char* intern(const std::string& text) {
  static std::mutex mutex;
  static std::unordered_set<std::string> texts;
  std::lock_guard<std::mutex> guard(mutex);
  return texts.insert(text).first->c_str();
}

std::string describe(const Access& access) {
  std::ostringstream text;
  text << access.name << " on sim:" << access.stream / kStreams << " stream " << access.stream % kStreams << " (launch "
       << access.launch;
  if (*access.where) text << ", " << access.where;
  text << ")";
  return text.str();
}

Clock& now(int stream) {
  join(streams[stream], known_to_host);
  return streams[stream];
}

const Clock& host() { return known_to_host; }

Access launch(int stream, const char* name) {
  Clock& clock = now(stream);
  return Access{stream, ++clock[stream], ++launched, name, where};
}

Clock all(int device) {
  Clock everything(kDevices * kStreams);
  for (int stream = 0; stream < kDevices * kStreams; ++stream) {
    if (device < 0 || stream / kStreams == device) join(everything, streams[stream]);
  }
  return everything;
}

uint64_t launches() { return launched; }

void wait(const Clock& until, const char* what, int stream) {
  refuse_in_capture(what, stream);
  if (on_wait) on_wait(what);
  host_knows(until);
}

bool query(const Clock& until, int& asked, int stream) {
  refuse_in_capture("a query", stream);
  if (host_knew(until)) return true;
  if (++asked < kQueries) return false;
  asked = 0;
  host_knows(until);
  return true;
}

void restart() {
  Clock everything;
  {
    std::lock_guard<std::mutex> guard(lock());
    everything = all(-1);
  }
  host_knows(everything);
}

}  // namespace sim
