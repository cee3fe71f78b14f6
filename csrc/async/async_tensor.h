// The result of a collective that may still be running.
//
// To its user it is a plain torch.Tensor. Its metadata is final from the start; its data is not, until
// the collective is settled. Two things guard the data:
//  - the wake key: an operator that reads the tensor comes to the fallback in wake_fallback.cpp first,
//    which settles; one that only views it makes another pending tensor of the same collective;
//  - raw access: has_storage() and storage() are virtual in TensorImpl and settle here, so that
//    data_ptr(), numpy(), DLPack, pickling, Triton launchers and any C++ code see finished data,
//    whether or not the operator came through the dispatcher.
//
// After settle() the key set is that of a plain tensor, and later operators cost what plain ones cost.
//
//   y = all_reduce(x); v = y.view(-1); v.sum()      waits once, at sum()
//
// A CommTensor (comm_tensor.h) has this implementation too. Collectives may be started on it at any time, so
// it and its views keep the key for life.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace funcol {

class InPlaceCollectives;
class PendingCollective;

class AsyncTensorImpl final : public c10::TensorImpl {
 public:
  using PendingPtr = c10::intrusive_ptr<PendingCollective>;
  using InPlacePtr = c10::intrusive_ptr<InPlaceCollectives>;

  // The collectives that a tensor waits for: one or, for a CommTensor, all that were started on it.
  struct Awaited {
    Awaited(PendingPtr collective);  // NOLINT
    Awaited(InPlacePtr in_place);    // NOLINT
    Awaited(const Awaited& other);
    Awaited(Awaited&& other) noexcept;
    ~Awaited();

    PendingPtr collective;
    InPlacePtr in_place;
  };

  // Takes storage, dtype and keys of `source`. Callers use wrap(), which takes the other metadata as well.
  AsyncTensorImpl(const c10::TensorImpl& source, Awaited awaited);

  // Takes storage and dtype of `source`. The caller sets keys and version counter.
  AsyncTensorImpl(ImplType kind, const c10::TensorImpl& source, Awaited awaited);
  ~AsyncTensorImpl() override;

  // Returns a pending tensor with the storage, metadata and autograd history of `output`. `output` must be
  // fresh (no Python object, not held elsewhere as a variable): its autograd history is moved.
  static at::Tensor wrap(const at::Tensor& output, Awaited awaited);

  // Returns true if `tensor` has PyTorch's own dense implementation. wrap() would lose any other one, such as
  // those of nested, quantized and sparse tensors and of other extensions.
  static bool can_wrap(const at::Tensor& tensor);

  // Returns the AsyncTensorImpl of `tensor`, settled or not; null if it has another implementation.
  static AsyncTensorImpl* of(const at::Tensor& tensor) { return of(tensor.unsafeGetTensorImpl()); }
  static AsyncTensorImpl* of(c10::TensorImpl* impl);

  // Waits for the data and makes this tensor plain to the dispatcher. Raises what the Work raised.
  void settle() const;
  bool is_pending() const;
  const Awaited& awaited() const noexcept { return awaited_; }
  const PendingPtr& pending() const noexcept { return awaited_.collective; }
  const InPlacePtr& in_place() const noexcept { return awaited_.in_place; }

  // Returns a plain tensor of the same storage, metadata and version counter, without autograd history.
  at::Tensor plain_alias() const;

  bool has_storage() const override;
  const c10::Storage& storage() const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                              bool allow_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                              bool allow_change) const override;

  // A scope in which the current thread takes storage of pending tensors without waiting: for view kernels,
  // which pass storage on and never read it.
  class SharingStorage {
   public:
    SharingStorage() noexcept;
    ~SharingStorage();
    SharingStorage(const SharingStorage&) = delete;
    SharingStorage& operator=(const SharingStorage&) = delete;
  };

 private:
  template <typename Version>
  c10::intrusive_ptr<c10::TensorImpl> copy_and_detach(Version&& version_counter, bool allow_change) const;
  bool copies_are_pending() const;
  const char* tensorimpl_type_name() const override;

  Awaited awaited_;
};

// Removes the wake key from `tensor`, whatever its implementation. Several threads may do so at once.
void remove_wake_key(const c10::TensorImpl& tensor);

// Adds the wake key to `tensor` if it is a CommTensor, else removes the key: for a tensor into which another
// tensor's metadata may have been copied.
void correct_wake_key(c10::TensorImpl& tensor);

// Returns true while the data of `tensor` has not arrived.
bool is_pending(const at::Tensor& tensor);

// Waits for the data of `tensor`, or of each of `tensors`, if it is pending; else does nothing.
void settle(const at::Tensor& tensor);
void settle(at::TensorList tensors);

}  // namespace funcol
