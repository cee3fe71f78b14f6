#include "simulated_gpu/programs.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "simulated_gpu/device.h"
#include "simulated_gpu/thread_ranks.h"

namespace simulated_gpu {
namespace {

constexpr int kRounds = 4;

// A stream uses what another one computes.
bool other_stream_reads(bool waits) {
  const OwnStream producer;
  const OwnStream consumer;
  const Buffer data(0);
  const Buffer copy(0);
  for (int i = 0; i < kRounds; ++i) {
    EXPECT_CUDA(add(producer, data, data, 1));
  }
  if (waits) {
    wait_for(consumer, producer);
  }
  EXPECT_CUDA(add(consumer, copy, data, 0));
  return copy.holds(kRounds);
}

// Queries until the event has finished, at most `seconds`; returns whether it has.
bool finishes_within(cudaEvent_t event, double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (cudaEventQuery(event) != cudaSuccess) {
    if (std::chrono::steady_clock::now() > end) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

// A stream uses what a thread has seen finished: the one that goes on, or one that only looks on, as the
// watchdog of a process group does. The latter sees it after a while, and may have told the program then.
bool stream_reads_after_query(bool looks_itself, double seconds) {
  const OwnStream producer;
  const OwnStream consumer;
  const Buffer data(0);
  const Buffer copy(0);
  EXPECT_CUDA(add(producer, data, data, 1));
  const OwnEvent produced;
  EXPECT_CUDA(cudaEventRecord(produced, producer));
  bool is_seen = false;
  const auto look = [&] { is_seen = finishes_within(produced, seconds); };
  if (looks_itself) {
    EXPECT_CUDA(cudaEventSynchronize(produced));
    look();
  } else {
    std::thread(look).join();
  }
  EXPECT_EQ(is_seen, looks_itself || seconds > 5);
  EXPECT_CUDA(add(consumer, copy, data, 0));
  return copy.holds(1);
}

// A stream overwrites what another one still reads.
bool other_stream_overwrites(bool waits) {
  const OwnStream reader;
  const OwnStream writer;
  const Buffer data(1);
  const Buffer copy(0);
  const Buffer nothing(0);
  for (int i = 0; i < kRounds; ++i) {
    EXPECT_CUDA(add(reader, nothing, nothing, 1));
  }
  EXPECT_CUDA(add(reader, copy, data, 0));
  if (waits) {
    wait_for(writer, reader);
  }
  EXPECT_CUDA(cudaMemsetAsync(data.data(), 0, kBytes, writer));
  return copy.holds(1);
}

// Returns true if a custom allocator reuses a block while a second stream still uses it.
bool block_is_handed_out_again(bool records_stream) {
  const OwnStream owner;
  const OwnStream user;
  const Buffer block(1);
  const Buffer copy(0);
  wait_for(user, owner);
  EXPECT_CUDA(add(user, copy, block, 0));
  if (records_stream) {
    const OwnEvent used;
    EXPECT_CUDA(cudaEventRecord(used, user));
    EXPECT_CUDA(cudaEventSynchronize(used));
  }
  const auto poison = [data = block.data()] { memset(host_address(data), kPoisonByte, kBytes); };
  EXPECT_CUDA(enqueue(owner, {"poison", at_once(poison), {}, {block.range()}, Kind::kPoison}));
  return copy.holds(1);
}

// The host reads pinned memory to which a stream still copies.
bool host_reads_copy(bool waits) {
  const OwnStream stream;
  const Buffer data(0);
  int* pinned = nullptr;
  EXPECT_CUDA(cudaMallocHost(reinterpret_cast<void**>(&pinned), kBytes));
  EXPECT_CUDA(add(stream, data, data, 1));
  EXPECT_CUDA(cudaMemcpyAsync(pinned, data.data(), kBytes, cudaMemcpyDeviceToHost, stream));
  if (waits) {
    EXPECT_CUDA(cudaStreamSynchronize(stream));
  }
  return std::accumulate(pinned, pinned + kCount, 0) == kCount;
}

int* make_pinned(int value) {
  int* pinned = nullptr;
  EXPECT_CUDA(cudaMallocHost(reinterpret_cast<void**>(&pinned), kBytes));
  std::fill_n(pinned, kCount, value);
  return pinned;
}

// The host writes to pinned memory from which a stream still copies.
bool host_writes_source_of_copy(bool waits) {
  const OwnStream stream;
  const Buffer data(0);
  int* const pinned = make_pinned(1);
  std::atomic<bool> released{waits};
  hold(stream, released);
  EXPECT_CUDA(cudaMemcpyAsync(data.data(), pinned, kBytes, cudaMemcpyHostToDevice, stream));
  if (waits) {
    EXPECT_CUDA(cudaStreamSynchronize(stream));
  }
  std::fill_n(pinned, kCount, 2);
  released = true;
  return data.holds(1);
}

// A stream copies to pinned memory, and from there.
bool copy_through_pinned_memory() {
  const OwnStream stream;
  const Buffer data(1);
  const Buffer copy(0);
  int* const pinned = make_pinned(0);
  EXPECT_CUDA(add(stream, data, data, 1));
  EXPECT_CUDA(cudaMemcpyAsync(pinned, data.data(), kBytes, cudaMemcpyDeviceToHost, stream));
  EXPECT_CUDA(cudaMemcpyAsync(copy.data(), pinned, kBytes, cudaMemcpyHostToDevice, stream));
  return copy.holds(2);
}

// Two streams of a graph; the second reads what the first writes.
bool graph_of_two_streams(bool waits) {
  const OwnStream first;
  const OwnStream second;
  const Buffer data(0);
  const Buffer copy(0);
  EXPECT_CUDA(cudaStreamBeginCapture(first, cudaStreamCaptureModeGlobal));
  wait_for(second, first);
  for (int i = 0; i < kRounds; ++i) {
    EXPECT_CUDA(add(first, data, data, 1));
  }
  if (waits) {
    wait_for(second, first);
  }
  EXPECT_CUDA(add(second, copy, data, 0));
  wait_for(first, second);
  cudaGraph_t graph = nullptr;
  EXPECT_CUDA(cudaStreamEndCapture(first, &graph));
  cudaGraphExec_t executable = nullptr;
  EXPECT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  EXPECT_CUDA(cudaGraphLaunch(executable, first));
  return copy.holds(kRounds);
}

bool host_reads_device_memory() {
  const Buffer data(7);
  return *const_cast<volatile int*>(data.data()) == 7;
}

bool host_reads_behind_allocation() {
  const Buffer data(7);
  volatile const int* const behind = static_cast<int*>(host_address(data.data())) + 4096 / sizeof(int);
  return *behind == 7;
}

bool work_fails() {
  const Buffer data(0);
  EXPECT_EQ(cudaSuccess,
            enqueue(nullptr, {"bad kernel", at_once([] { throw std::runtime_error("on purpose"); })}));
  return cudaDeviceSynchronize() == cudaErrorLaunchFailure &&
         cudaDeviceSynchronize() == cudaErrorLaunchFailure;
}

// One stream uses what another one computed, and the host waits for it.
bool traced_streams() {
  const OwnStream producer;
  const OwnStream consumer;
  const Buffer data(3);
  const Buffer copy(0);
  simulated_gpu_trace_mark("a \"step\"");
  EXPECT_CUDA(add(producer, data, data, 1));
  EXPECT_CUDA(cudaStreamSynchronize(producer));
  wait_for(consumer, producer);
  EXPECT_CUDA(add(consumer, copy, data, 0));
  EXPECT_CUDA(cudaStreamSynchronize(consumer));
  return copy.holds(4);
}

// Rank 0 of 4, the others of which do not exist.
class LoneRank {
 public:
  LoneRank() {
    ncclUniqueId id;
    expect_success(ncclGetUniqueId(&id));
    expect_success(ncclCommInitRank(&communicator_, 4, id, 0));
  }
  ~LoneRank() { ncclCommDestroy(communicator_); }
  LoneRank(const LoneRank&) = delete;
  LoneRank& operator=(const LoneRank&) = delete;

  // NOLINTNEXTLINE(google-explicit-constructor)
  operator ncclComm_t() const { return communicator_; }

 private:
  ncclComm_t communicator_ = nullptr;
};

bool alone_all_reduce() {
  const OwnStream stream;
  const LoneRank rank;
  const Floats data(stream, {1, 2});
  expect_success(ncclAllReduce(data.data(), data.data(), 2, ncclFloat32, ncclSum, rank, stream));
  return data.read() == Values{4, 8};
}

bool alone_all_gather() {
  const OwnStream stream;
  const LoneRank rank;
  const Floats mine(stream, {1, 2});
  const Floats all(stream, unset(8));
  expect_success(ncclAllGather(mine.data(), all.data(), 2, ncclFloat32, rank, stream));
  return all.read() == Values{1, 2, 1, 2, 1, 2, 1, 2};
}

bool alone_broadcast() {
  const OwnStream stream;
  const LoneRank rank;
  const Floats data(stream, {1, 2});
  expect_success(ncclBcast(data.data(), 2, ncclFloat32, 3, rank, stream));
  return data.read() == Values{0, 0};
}

bool alone_split() {
  const LoneRank rank;
  ncclComm_t child = nullptr;
  return ncclCommSplit(rank, 0, 0, &child, nullptr) == ncclInvalidUsage && child == nullptr;
}

}  // namespace

const std::map<std::string, std::function<bool()>>& programs() {
  static const std::map<std::string, std::function<bool()>> programs = {
      {"read after a wait", [] { return other_stream_reads(true); }},
      {"read without a wait", [] { return other_stream_reads(false); }},
      {"overwrite after a wait", [] { return other_stream_overwrites(true); }},
      {"read after a query", [] { return stream_reads_after_query(true, 0); }},
      {"read after an onlooker's query", [] { return stream_reads_after_query(false, 0.2); }},
      {"read long after an onlooker's query", [] { return stream_reads_after_query(false, 60); }},
      {"overwrite without a wait", [] { return other_stream_overwrites(false); }},
      {"block again after its event", [] { return block_is_handed_out_again(true); }},
      {"block again at once", [] { return block_is_handed_out_again(false); }},
      {"host after a synchronize", [] { return host_reads_copy(true); }},
      {"host without a synchronize", [] { return host_reads_copy(false); }},
      {"host writes after a copy", [] { return host_writes_source_of_copy(true); }},
      {"host writes before a copy", [] { return host_writes_source_of_copy(false); }},
      {"copy through pinned memory", copy_through_pinned_memory},
      {"graph with a wait", [] { return graph_of_two_streams(true); }},
      {"graph without a wait", [] { return graph_of_two_streams(false); }},
      {"host reads device memory", host_reads_device_memory},
      {"host reads behind an allocation", host_reads_behind_allocation},
      {"work fails", work_fails},
      {"trace: two streams", traced_streams},
      {"alone: all_reduce", alone_all_reduce},
      {"alone: all_gather", alone_all_gather},
      {"alone: broadcast of another rank", alone_broadcast},
      {"alone: split", alone_split},
  };
  return programs;
}

Outcome run_program(const std::string& name, const Schedule& schedule) {
  std::array<int, 2> channel{};
  if (pipe(channel.data()) != 0) {
    return {-1, "no pipe"};
  }
  const pid_t child = fork();
  if (child == 0) {
    dup2(channel[1], STDERR_FILENO);
    close(channel[0]);
    setenv("SIMULATED_GPU_SEED", std::to_string(schedule.seed).c_str(), 1);
    setenv("SIMULATED_GPU_ORDER", schedule.order.c_str(), 1);
    setenv("SIMULATED_GPU_RACES", schedule.races ? "1" : "0", 1);
    setenv("SIMULATED_GPU_TRACE_FILE", schedule.trace_file.c_str(), 1);
    setenv("SIMULATED_GPU_ALONE", schedule.alone ? "1" : "0", 1);
    for (const char* options :
         {"ASAN_OPTIONS", "TSAN_OPTIONS"}) {  // else a sanitizer makes an exit of a signal
      const char* given = getenv(options);
      setenv(options, (std::string(given == nullptr ? "" : given) + ":handle_segv=0").c_str(), 1);
    }
    alarm(60);
    execl("/proc/self/exe", "test_simulated_gpu", ("--program=" + name).c_str(), nullptr);
    _exit(127);
  }
  close(channel[1]);
  Outcome outcome{0, ""};
  std::array<char, 4096> buffer{};
  for (ssize_t n = 0; (n = read(channel[0], buffer.data(), buffer.size())) > 0;) {
    outcome.errors.append(buffer.data(), static_cast<size_t>(n));
  }
  close(channel[0]);
  int status = 0;
  waitpid(child, &status, 0);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return outcome;
}

}  // namespace simulated_gpu
