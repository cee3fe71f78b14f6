// Memory of the simulated devices and of the host.
//
// Two windows of one size lie side by side in the address space. The program holds addresses in the first,
// where nothing is ever mapped; the bytes of device memory are in the second, at the same distance. Each
// allocation has pages to itself and an unmapped page behind it, and no address is allocated twice: whatever
// reads or writes past an allocation, or after it was freed, faults.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace simulated_gpu {

enum class MemoryKind { kDevice, kPinned, kRegistered, kManaged };

struct Allocation {
  char* begin;
  size_t size;
  int device;
  MemoryKind kind;
};

class Memory {
 public:
  Memory();

  // Filled with poison. Null where the device's memory, or the host's, is used up.
  void* allocate(size_t size, MemoryKind kind, int device);

  // False if `address` is not the beginning of an allocation of that sort.
  bool release(void* address);

  // Memory that the program allocated itself and pins, or no longer pins.
  void add_registered(void* address, size_t size, int device);
  bool remove_registered(void* address);

  // The allocation that holds `address`.
  std::optional<Allocation> find(const void* address) const;

  size_t used(int device) const;

  bool is_device_address(const void* address) const {
    const auto* const byte = static_cast<const char*>(address);
    return byte >= window_ && byte < window_ + kWindow;
  }

  void* host_address(const void* address) const {
    auto* const byte = static_cast<char*>(const_cast<void*>(address));
    return is_device_address(address) ? byte + kWindow : byte;
  }

 private:
#ifdef __SANITIZE_THREAD__
  static constexpr size_t kWindow = size_t{256} << 30;  // its own memory leaves no room for more
#else
  static constexpr size_t kWindow = size_t{8} << 40;
#endif

  void* take_from_window(size_t bytes);

  char* window_;
  size_t next_ = 0;  // offset of the first byte of the window that was never allocated
  mutable std::mutex mutex_;
  std::map<char*, Allocation> allocations_;
  std::vector<size_t> used_;  // bytes of device memory, by device
};

// Never destroyed, as device memory is not.
Memory& memory();

}  // namespace simulated_gpu
