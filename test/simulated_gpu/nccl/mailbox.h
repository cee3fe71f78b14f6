// Mail between ranks of one host: files in shared memory.
//
// A rank posts a letter under a key that sender and readers derive alike. The letter appears at once,
// complete, and a counted number of readers read it, each once. The last reader removes it:
//
//   rank 0: post("a", "head", "body", 2);
//   rank 1: Letter letter("a"); while (!letter.has_arrived()) ...; letter.head() == "head"
//   rank 2: the same; when both letters are destroyed, is_unread("a") is false and the file is gone
//
// The functions do not block, so ranks may be processes or threads of one process.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace simulated_gpu::nccl {

// Leaves `head` and `body` for `num_readers`; nothing if there are none. False if there is a letter of this
// key already. Throws std::system_error if shared memory is full.
bool post(const std::string& key, std::string_view head, std::string_view body, int num_readers);

// Returns true if the letter of `key` waits for a reader.
bool is_unread(const std::string& key);

// Takes back a letter; readers that have it keep it.
void withdraw(const std::string& key);

// A letter that one reader awaits and reads.
class Letter {
 public:
  explicit Letter(std::string key) : key_(std::move(key)) {}
  ~Letter();  // has read it, if it has arrived
  Letter(const Letter&) = delete;
  Letter& operator=(const Letter&) = delete;

  const std::string& key() const { return key_; }

  bool has_arrived();

  // Parts of a letter that has arrived. The body is aligned to 64 bytes.
  std::string_view head() const;
  std::string_view body() const;

 private:
  struct Envelope;
  friend bool post(const std::string&, std::string_view, std::string_view, int);

  std::string key_;
  Envelope* envelope_ = nullptr;
  size_t size_ = 0;
};

}  // namespace simulated_gpu::nccl
