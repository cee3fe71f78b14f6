#include "trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <mutex>
#include <string>

#include "memory.h"

namespace simulated_gpu {
namespace {

constexpr size_t kBuffered = size_t{1} << 20;

// The outermost call of a thread, so far.
struct Call {
  int depth = 0;
  int64_t begin = 0;
  int64_t own = 0;          // the thread's processor time before it
  int64_t end_of_last = 0;  // in that time, of the last one that was written
  std::string issued = {};
  std::string waits = {};
};

// Never destroyed: threads that end still call CUDA.
Call& call_of_thread() {
  thread_local auto* const call = new Call();
  return *call;
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(SteadyClock::now().time_since_epoch()).count();
}

// How long this thread ran, without the time in which others had the processor.
int64_t processor_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

// Opened at the first line, so a process that issues nothing leaves the file alone.
class File {
 public:
  static File& instance() {
    static auto* const file = new File();
    return *file;
  }

  void add(const std::string& line) {
    const std::scoped_lock lock(mutex_);
    buffer_ += line;
  }

  void write_if_longer_than(size_t size) {
    const std::scoped_lock lock(mutex_);
    if (buffer_.size() <= size) {
      return;
    }
    size_t begin = 0;
    while (begin < buffer_.size()) {
      const ssize_t count = write(file_, buffer_.data() + begin, buffer_.size() - begin);
      if (count <= 0) {
        break;
      }
      begin += static_cast<size_t>(count);
    }
    buffer_.clear();
  }

 private:
  File() {
    std::string path = options().trace_file;
    if (const size_t at = path.find("%p"); at != std::string::npos) {
      path.replace(at, 2, std::to_string(getpid()));
    }
    file_ = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file_ < 0) {
      perror(("simulated GPU: the trace file " + path).c_str());
    }
    atexit([] { instance().write_if_longer_than(0); });
  }

  std::mutex mutex_;
  std::string buffer_;
  int file_ = -1;
};

std::string quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
    }
    quoted += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return quoted + '"';
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kCopy:
      return "copy";
    case Kind::kOrder:
      return "order";
    case Kind::kCollective:
      return "collective";
    case Kind::kPoison:
      return "poison";
    case Kind::kKernel:
      break;
  }
  return "kernel";
}

std::string text_of(const std::vector<Mark>& marks) {
  std::string text;
  for (const Mark& mark : marks) {
    if (mark.count == 0) {
      continue;
    }
    text += (text.empty() ? "[" : ", [") + std::to_string(mark.stream->id) + ", " +
            std::to_string(mark.count) + "]";
  }
  return text;
}

struct Bytes {
  size_t device = 0;
  size_t host = 0;
};

Bytes bytes_of(const std::vector<Range>& ranges) {
  Bytes bytes;
  for (const Range& range : ranges) {
    (memory().is_device_address(range.begin) ? bytes.device : bytes.host) += range.size;
  }
  return bytes;
}

std::string text_of(const Stream& stream, const Operation& operation) {
  const Work& work = operation.work;
  const Bytes read = bytes_of(work.reads);
  const Bytes written = bytes_of(work.writes);
  const bool has_amount = work.amount.read + work.amount.written > 0;
  const auto field = [](const char* name, auto value) {
    return ", \"" + std::string(name) + "\": " + std::to_string(value);
  };
  return "{\"name\": " + quoted(work.name) + R"(, "kind": ")" + name_of(work.kind) + "\"" +
         field("device", stream.device) + field("stream", stream.id) + field("number", stream.num_issued) +
         ", \"after\": [" + text_of(operation.after) + "]" +
         field("read", has_amount ? work.amount.read : read.device) +
         field("written", has_amount ? work.amount.written : written.device) +
         field("host", read.host + written.host) + field("flops", work.amount.flops) +
         ", \"type\": " + quoted(work.amount.type) + field("ranks", work.amount.num_ranks) + "}";
}

void append(std::string& list, const std::string& item) { list += (list.empty() ? "" : ", ") + item; }

void write_line(Call& call) {
  const std::string line = "{\"thread\": " + std::to_string(gettid()) + ", \"issued\": [" + call.issued +
                           "], \"waits\": [" + call.waits + "], \"own\": " + std::to_string(call.own) +
                           ", \"begin\": " + std::to_string(call.begin) + ", \"end\": ";
  File::instance().write_if_longer_than(call.waits.empty() ? kBuffered : 0);
  call.issued.clear();
  call.waits.clear();
  File::instance().add(line + std::to_string(now()) + "}\n");
  call.end_of_last = processor_time();
}

}  // namespace

TracedCall::TracedCall() {
  if (!is_traced()) {
    return;
  }
  Call& call = call_of_thread();
  if (call.depth++ == 0) {
    call.begin = now();
    call.own = processor_time() - call.end_of_last;
  }
}

TracedCall::~TracedCall() {
  if (!is_traced()) {
    return;
  }
  Call& call = call_of_thread();
  if (--call.depth == 0 && !(call.issued.empty() && call.waits.empty())) {
    write_line(call);
  }
}

void trace_issue(const Stream& stream, const Operation& operation) {
  if (is_traced()) {
    append(call_of_thread().issued, text_of(stream, operation));
  }
}

void trace_wait(const std::vector<Mark>& marks) {
  if (!is_traced()) {
    return;
  }
  if (const std::string text = text_of(marks); !text.empty()) {
    append(call_of_thread().waits, text);
  }
}

}  // namespace simulated_gpu

void simulated_gpu_trace_mark(const char* text) {
  using namespace simulated_gpu;  // NOLINT(google-build-using-namespace)
  if (is_traced()) {
    File::instance().add("{\"mark\": " + quoted(text) + ", \"begin\": " + std::to_string(now()) + "}\n");
    call_of_thread().end_of_last = processor_time();
  }
}
