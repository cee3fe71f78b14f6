#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "faults.h"
#include "simulated_gpu.h"

namespace simulated_gpu {
namespace {

constexpr size_t kPage = 4096;
constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

size_t in_pages(size_t size) { return (std::max<size_t>(size, 1) + kPage - 1) / kPage * kPage; }

bool counts_against_device(MemoryKind kind) { return kind == MemoryKind::kDevice; }

}  // namespace

Memory& memory() {
  static auto* const memory = new Memory();
  return *memory;
}

Memory::Memory() : used_(static_cast<size_t>(options().num_devices)) {
  void* const both = mmap(nullptr, 2 * kWindow, PROT_NONE, kReserved, -1, 0);
  if (both == MAP_FAILED) {
    fprintf(stderr,
            "simulated GPU: the system does not let a process reserve %zu GiB of addresses (ulimit -v?)\n",
            2 * kWindow >> 30);
    abort();
  }
  window_ = static_cast<char*>(both);
  report_faults_in(window_, kWindow);
}

// Of device memory; the page behind it stays unmapped.
void* Memory::take_from_window(size_t bytes) {
  if (next_ + bytes + kPage > kWindow) {
    return nullptr;
  }
  char* const address = window_ + next_;
  next_ += bytes + kPage;
  return mprotect(address + kWindow, bytes, PROT_READ | PROT_WRITE) == 0 ? address : nullptr;
}

void* Memory::allocate(size_t size, MemoryKind kind, int device) {
  void* address = nullptr;
  {
    const std::scoped_lock lock(mutex_);
    size_t& used = used_[static_cast<size_t>(device)];
    if (counts_against_device(kind)) {
      address = used + size <= options().device_bytes ? take_from_window(in_pages(size)) : nullptr;
    } else {
      address = mmap(nullptr, in_pages(size), PROT_READ | PROT_WRITE, kReserved, -1, 0);
      address = address == MAP_FAILED ? nullptr : address;
    }
    if (address == nullptr) {
      return nullptr;
    }
    used += counts_against_device(kind) ? size : 0;
    auto* const begin = static_cast<char*>(address);
    allocations_[begin] = {begin, size, device, kind};
  }
  memset(host_address(address), kPoisonByte, size);
  return address;
}

bool Memory::release(void* address) {
  const std::scoped_lock lock(mutex_);
  const auto found = allocations_.find(static_cast<char*>(address));
  if (found == allocations_.end() || found->second.kind == MemoryKind::kRegistered) {
    return false;
  }
  const Allocation allocation = found->second;
  allocations_.erase(found);
  if (counts_against_device(allocation.kind)) {
    used_[static_cast<size_t>(allocation.device)] -= allocation.size;
  }
  // The pages go back to the system; the addresses stay reserved.
  auto* const kept =
      mmap(host_address(address), in_pages(allocation.size), PROT_NONE, kReserved | MAP_FIXED, -1, 0);
  return kept != MAP_FAILED;
}

void Memory::add_registered(void* address, size_t size, int device) {
  const std::scoped_lock lock(mutex_);
  auto* const begin = static_cast<char*>(address);
  allocations_[begin] = {begin, size, device, MemoryKind::kRegistered};
}

bool Memory::remove_registered(void* address) {
  const std::scoped_lock lock(mutex_);
  const auto found = allocations_.find(static_cast<char*>(address));
  if (found == allocations_.end() || found->second.kind != MemoryKind::kRegistered) {
    return false;
  }
  allocations_.erase(found);
  return true;
}

std::optional<Allocation> Memory::find(const void* address) const {
  const std::scoped_lock lock(mutex_);
  auto* const byte = static_cast<char*>(const_cast<void*>(address));
  auto at = allocations_.upper_bound(byte);
  if (at == allocations_.begin()) {
    return std::nullopt;
  }
  const Allocation& allocation = (--at)->second;
  return byte < allocation.begin + std::max<size_t>(allocation.size, 1) ? std::optional(allocation)
                                                                        : std::nullopt;
}

size_t Memory::used(int device) const {
  const std::scoped_lock lock(mutex_);
  return used_[static_cast<size_t>(device)];
}

void* host_address(const void* address) { return memory().host_address(address); }

}  // namespace simulated_gpu
