#include "nccl/mailbox.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <system_error>

#include "nccl/leftovers.h"

namespace simulated_gpu::nccl {

// How a file begins. The head follows, then the body at the next multiple of kAlignment.
struct alignas(64) Letter::Envelope {
  uint64_t head_size;
  uint64_t body_size;
  std::atomic<int> num_readers;  // who have not read it; readers of several processes count it down
};

namespace {

constexpr size_t kAlignment = 64;

std::string path_of(const std::string& key) { return std::string("/dev/shm/") + kFilePrefix + key; }

size_t aligned(size_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// write() fails where memory is full; a write to mapped memory would kill the process.
void write_all(int file, std::string_view data) {
  while (!data.empty()) {
    const ssize_t written = write(file, data.data(), data.size());
    if (written < 0 && errno != EINTR) fail("cannot write a letter to /dev/shm");
    data.remove_prefix(static_cast<size_t>(std::max<ssize_t>(written, 0)));
  }
}

class File {
 public:
  File(const std::string& path, int flags) : descriptor_(open(path.c_str(), flags | O_CLOEXEC, 0600)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  operator int() const { return descriptor_; }

 private:
  int descriptor_;
};

}  // namespace

bool post(const std::string& key, std::string_view head, std::string_view body, int num_readers) {
  if (num_readers == 0) return true;
  static std::atomic<uint64_t> count{0};
  const std::string path = path_of(key);
  const std::string draft = path + ".new" + std::to_string(getpid()) + "." + std::to_string(count++);
  const File file(draft, O_WRONLY | O_CREAT | O_EXCL);
  if (file < 0) fail("cannot make " + draft);
  struct RemoveDraft {
    const std::string& path;
    ~RemoveDraft() { unlink(path.c_str()); }
  } const remove_draft{draft};
  const Letter::Envelope envelope{head.size(), body.size(), num_readers};
  write_all(file, {reinterpret_cast<const char*>(&envelope), sizeof envelope});
  write_all(file, head);
  write_all(file, std::string(aligned(head.size()) - head.size(), '\0'));
  write_all(file, body);
  // Unlike rename(), link() leaves a letter of this name alone.
  if (link(draft.c_str(), path.c_str()) == 0) return true;
  if (errno != EEXIST) fail("cannot name " + path);
  return false;
}

bool is_unread(const std::string& key) { return access(path_of(key).c_str(), F_OK) == 0; }

void withdraw(const std::string& key) { unlink(path_of(key).c_str()); }

bool Letter::has_arrived() {
  if (envelope_) return true;
  const File file(path_of(key_), O_RDWR);
  if (file < 0) return false;
  struct stat status {};
  if (fstat(file, &status) != 0) fail("cannot read " + path_of(key_));
  size_ = static_cast<size_t>(status.st_size);
  void* const mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) fail("cannot map " + path_of(key_));
  envelope_ = static_cast<Envelope*>(mapped);
  return true;
}

std::string_view Letter::head() const {
  return {reinterpret_cast<const char*>(envelope_ + 1), envelope_->head_size};
}

std::string_view Letter::body() const {
  return {reinterpret_cast<const char*>(envelope_ + 1) + aligned(envelope_->head_size), envelope_->body_size};
}

Letter::~Letter() {
  if (!envelope_) return;
  if (envelope_->num_readers.fetch_sub(1) == 1) withdraw(key_);
  munmap(envelope_, size_);
}

}  // namespace simulated_gpu::nccl
