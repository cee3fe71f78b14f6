// Waits for a collective before the memory that it writes to is replaced.
//
// A tensor that grows, by resize_ or as the out= of an operator, takes new memory from its storage's
// allocator, copies the old memory, and frees it. It does so past TensorImpl::storage(), and on the CPU past
// the dispatcher, but it has to call the allocator. While a collective runs, each storage that it writes to
// therefore has an allocator that settles first.
//
//   y = all_reduce(x); y.resize_(100)      in a compiled region, too: waits, then grows
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

namespace funcol {

class PendingCollective;

// The guards of one collective. Several collectives may write to parts of one storage, which waits for all of
// them before it grows.
class ResizeGuards {
 public:
  ResizeGuards(const std::vector<at::Tensor>& outputs, PendingCollective& collective);
  ~ResizeGuards() { remove(); }
  ResizeGuards(const ResizeGuards&) = delete;
  ResizeGuards& operator=(const ResizeGuards&) = delete;

  // Removes the guards. The storages must live until this call.
  void remove();

 private:
  class Guard final : public c10::Allocator {
   public:
    Guard(c10::StorageImpl* storage, PendingCollective* collective)
        : storage_(storage), collective_(collective) {}

    c10::DataPtr allocate(size_t num_bytes) override;
    void copy_data(void* to, const void* from, size_t num_bytes) const override;

    void install();
    void remove();

   private:
    static Guard* of(c10::Allocator* allocator);
    void unlink();
    // Returns null if no reference to the collective is left.
    c10::intrusive_ptr<PendingCollective> collective();

    c10::StorageImpl* storage_;
    PendingCollective* collective_;
    bool has_weak_reference_ = false;
    c10::Allocator* below_ = nullptr;
  };

  c10::SmallVector<Guard, 1> guards_;
};

}  // namespace funcol
