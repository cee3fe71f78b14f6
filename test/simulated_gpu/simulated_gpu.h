// Interface that the libraries of the simulated GPU share: the queues of simulated streams, exported by
// libcudart.so.13.
//
// Device memory has two addresses. Programs hold device addresses, at which nothing is mapped: host code that
// reads one faults, as it would beside a GPU. Work that a stream runs finds the bytes at host_address().
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#define SIMULATED_GPU_API __attribute__((visibility("default")))

namespace simulated_gpu {

// A stream calls `Begin` when it reaches the work. An empty Step means that the work is finished; any other
// is called again and again until it returns true, as collectives wait for their peers without blocking other
// streams. A graph calls Begin once a replay, so it must not use up what it holds.
using Step = std::function<bool()>;
using Begin = std::function<Step()>;

// Bytes that work reads or writes, by their device addresses.
struct Range {
  const void* begin = nullptr;
  size_t size = 0;
};

enum class Kind {
  kKernel,
  kCopy,        // by cudaMemcpy and its like
  kOrder,       // takes no time on a device: an event's record, a wait for it, a host function
  kCollective,  // may wait for other ranks: other streams run first more often
  kPoison,      // fills memory that is reused; dropped while its stream is capturing
};

// Amounts that a model of time needs besides the ranges of work. Only the trace file has them.
struct Amount {
  size_t read = 0;  // bytes of device memory; if both are 0, those of the ranges
  size_t written = 0;
  int64_t flops = 0;      // of matrix products
  std::string type = {};  // and of what type their elements are: "Float"
  int num_ranks = 0;      // of a collective
};

// One operation of a stream.
struct Work {
  std::string name;
  Begin begin;
  std::vector<Range> reads = {};
  std::vector<Range> writes = {};
  Kind kind = Kind::kKernel;
  // Work of one chain runs in the order in which the host issued it, whatever its streams, as that of one
  // NCCL communicator does. Null: none.
  const void* chain = nullptr;
  Amount amount = {};
};

// Work that is finished when `run` returns.
template <typename Run>
Begin at_once(Run run) {
  return [run = std::move(run)]() -> Step {
    run();
    return nullptr;
  };
}

// Enqueues work as a kernel's launch does; records it in the graph if the stream is capturing. Fails where
// CUDA would (an unknown stream, an invalidated capture) and after an earlier operation failed.
SIMULATED_GPU_API cudaError_t enqueue(cudaStream_t stream, Work work);

// Returns the host address of device memory; any other address is returned unchanged.
SIMULATED_GPU_API void* host_address(const void* address);

// A launch as cudaLaunchKernel() has it: `args` holds the addresses of the kernel's arguments, which may be
// gone when the stream reaches the launch.
struct Launch {
  std::string name;  // demangled
  dim3 grid, block;
  void** args;
};

// The host implementation of all kernels whose demangled names contain `part_of_name`. `implement` copies
// what it needs of the arguments and returns the work (its name is the kernel's own).
using Implement = std::function<Work(const Launch&)>;
SIMULATED_GPU_API void register_kernel(std::string part_of_name, Implement implement);

SIMULATED_GPU_API bool is_capturing(cudaStream_t stream);

// The scheduler's numbers, from the seed. Only for work that runs.
SIMULATED_GPU_API uint64_t random();

// The byte that fills memory without a value: 0xFF, NaN in every floating type.
constexpr int kPoisonByte = 0xFF;

// Options of the command line of tools/simulated_gpu. Times in microseconds.
struct Options {
  enum class Order {
    kRandom,  // the stream of the highest priority runs; priorities are drawn, and drawn anew now and then
    kLast,    // what was issued last first
    kLazy,    // only work that is waited for
    kFirst,   // in the order of issue, at once
  };
  int num_devices = 2;
  uint64_t seed = 0;
  Order order = Order::kRandom;
  int64_t delay_us = 0;         // each collective is held back for up to this
  bool trace = false;           // every operation is printed as it runs
  std::string trace_file = {};  // what the host issues is written there (runtime/trace.h); empty: nowhere
  bool races = true;            // accesses that nothing orders are reported
  bool alone = false;  // other ranks of NCCL do not exist: they are taken to send what this one sends
  size_t device_bytes = size_t{80} << 30;
};
SIMULATED_GPU_API const Options& options();

// A call of the program into the simulation. The trace file has the time that it takes: on a GPU it would be
// another one. Each call on a stream is one by itself; a caller that does more around it makes a larger one.
class SIMULATED_GPU_API TracedCall {
 public:
  TracedCall();
  ~TracedCall();
  TracedCall(const TracedCall&) = delete;
  TracedCall& operator=(const TracedCall&) = delete;
};

// The place where the host issued an operation, captured by a registered function, else unknown.
class IssuePlace {
 public:
  virtual ~IssuePlace() = default;
  virtual std::string text() const = 0;  // lines, innermost call first
};
using FindIssuePlace = std::function<std::shared_ptr<const IssuePlace>()>;
SIMULATED_GPU_API void set_find_issue_place(FindIssuePlace find);

// The next operation of a chain that does not begin, since running operations of other chains come first.
struct Stalled {
  const void* chain = nullptr;
  std::string name = {};
  std::shared_ptr<const IssuePlace> place = nullptr;
  std::vector<const void*> behind = {};  // the chains of those that run
};

// The scheduler's thread calls the function that is given here once nothing has begun or finished for a
// while, and again and again until something does. Just before that it calls it without `stalls`.
using OnStall = std::function<void(const std::vector<Stalled>* stalls)>;
SIMULATED_GPU_API void set_on_stall(OnStall on_stall);

// Reports something that is wrong in the program, on stderr with the seed and the order; the process ends
// with exit status 66 where it would have ended with 0.
SIMULATED_GPU_API void report(const std::string& text);

}  // namespace simulated_gpu

// For tests: how many reports there were, and the text of them, which the next call does not return again.
extern "C" SIMULATED_GPU_API int simulated_gpu_num_reports();
extern "C" SIMULATED_GPU_API const char* simulated_gpu_take_reports();

// Writes a mark of the program's own to the trace file, as where a step begins.
extern "C" SIMULATED_GPU_API void simulated_gpu_trace_mark(const char* text);
