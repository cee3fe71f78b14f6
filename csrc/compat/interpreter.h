// PyTorch's table of what it calls in the Python interpreter, with every call forwarded to another table.
//
// The list of functions is that of PyTorch 2.15.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/PyInterpreter.h>
#include <torch/version.h>

#include <string>
#include <utility>

namespace funcol::compat {

class ForwardingInterpreter : public c10::impl::PyInterpreterVTable {
 public:
  using Table = c10::impl::PyInterpreterVTable;
  using TensorImpl = c10::TensorImpl;

  const Table* base() const { return base_; }
  void set_base(const Table* base) { base_ = base; }

  std::string name() const override { return base_->name(); }
  void incref(PyObject* object) const override { base_->incref(object); }
  void decref(PyObject* object) const override { base_->decref(object); }
  bool try_incref(const c10::impl::PyObjectSlot& slot) const override { return base_->try_incref(slot); }
  size_t refcnt(PyObject* object) const override { return base_->refcnt(object); }
  c10::intrusive_ptr<TensorImpl> detach(const TensorImpl* self) const override { return base_->detach(self); }
  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    base_->dispatch(op, stack);
  }
  void reportErrorCallback(PyObject* callback, c10::DispatchKey key) const override {
    base_->reportErrorCallback(callback, key);
  }
  void python_op_registration_trampoline(const c10::OperatorHandle& op, c10::DispatchKey key,
                                         c10::DispatchKeySet keys, torch::jit::Stack* stack, bool with_keys,
                                         bool with_op) const override {
    base_->python_op_registration_trampoline(op, key, keys, stack, with_keys, with_op);
  }
  void throw_abstract_impl_not_imported_error(std::string op, const char* module,
                                              const char* context) const override {
    base_->throw_abstract_impl_not_imported_error(std::move(op), module, context);
  }
  void python_dispatcher(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) const override {
    base_->python_dispatcher(op, keys, stack);
  }
  bool is_contiguous(const TensorImpl* self, at::MemoryFormat format) const override {
    return base_->is_contiguous(self, format);
  }
  c10::SymBool sym_is_contiguous(const TensorImpl* self, at::MemoryFormat format) const override {
    return base_->sym_is_contiguous(self, format);
  }
  bool is_strides_like(const TensorImpl* self, at::MemoryFormat format) const override {
    return base_->is_strides_like(self, format);
  }
  bool is_non_overlapping_and_dense(const TensorImpl* self) const override {
    return base_->is_non_overlapping_and_dense(self);
  }
  c10::Device device(const TensorImpl* self) const override { return base_->device(self); }
  int64_t dim(const TensorImpl* self) const override { return base_->dim(self); }
  c10::IntArrayRef strides(const TensorImpl* self) const override { return base_->strides(self); }
  c10::IntArrayRef sizes(const TensorImpl* self) const override { return base_->sizes(self); }
  c10::SymIntArrayRef sym_sizes(const TensorImpl* self) const override { return base_->sym_sizes(self); }
  c10::Layout layout(const TensorImpl* self) const override { return base_->layout(self); }
  int64_t numel(const TensorImpl* self) const override { return base_->numel(self); }
  c10::SymInt sym_numel(const TensorImpl* self) const override { return base_->sym_numel(self); }
  c10::SymIntArrayRef sym_strides(const TensorImpl* self) const override { return base_->sym_strides(self); }
  c10::SymInt sym_storage_offset(const TensorImpl* self) const override {
    return base_->sym_storage_offset(self);
  }
  void trace_gpu_event_creation(c10::DeviceType type, uintptr_t event) const override {
    base_->trace_gpu_event_creation(type, event);
  }
  void trace_gpu_event_deletion(c10::DeviceType type, uintptr_t event) const override {
    base_->trace_gpu_event_deletion(type, event);
  }
  void trace_gpu_event_record(c10::DeviceType type, uintptr_t event, uintptr_t stream) const override {
    base_->trace_gpu_event_record(type, event, stream);
  }
  void trace_gpu_event_wait(c10::DeviceType type, uintptr_t event, uintptr_t stream) const override {
    base_->trace_gpu_event_wait(type, event, stream);
  }
  void trace_gpu_memory_allocation(c10::DeviceType type, uintptr_t pointer) const override {
    base_->trace_gpu_memory_allocation(type, pointer);
  }
  void trace_gpu_memory_deallocation(c10::DeviceType type, uintptr_t pointer) const override {
    base_->trace_gpu_memory_deallocation(type, pointer);
  }
  void trace_gpu_stream_creation(c10::DeviceType type, uintptr_t stream) const override {
    base_->trace_gpu_stream_creation(type, stream);
  }
  void trace_gpu_device_synchronization(c10::DeviceType type) const override {
    base_->trace_gpu_device_synchronization(type);
  }
  void trace_gpu_stream_synchronization(c10::DeviceType type, uintptr_t stream) const override {
    base_->trace_gpu_stream_synchronization(type, stream);
  }
  void trace_gpu_event_synchronization(c10::DeviceType type, uintptr_t event) const override {
    base_->trace_gpu_event_synchronization(type, event);
  }
  void reset_backward_hooks(const TensorImpl* self) const override { base_->reset_backward_hooks(self); }

 private:
  const Table* base_ = nullptr;
};

}  // namespace funcol::compat
