// Layers of PyTorch that watch or rewrite what runs: dispatch modes (FakeTensor, make_fx, CommDebugMode),
// tensor subclasses, functorch transforms, functionalization, torch.jit.trace.
//
// Under a layer, collectives go through PyTorch's own _c10d_functional ops, which every layer knows, and no
// pending tensors are made.
//
// A program may replace kernels of those ops, for example with torch.library. Collectives then take the same
// path, so that its kernels are called; results may still be pending.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace funcol {

// Sets whether a program has replaced kernels of _c10d_functional.
void set_ops_are_replaced(bool are_replaced);

// Returns true if a layer is active on this thread or kernels are replaced: collectives then go through
// PyTorch's ops.
bool has_active_layers();

// Returns true if a layer is active on this thread, which has to see waits and views too.
bool has_watching_layers();

// Returns true if a functorch transform is active on this thread: grad, vmap, jvp.
bool has_active_transforms();

// Returns true if `tensor` itself belongs to a layer: a subclass with __torch_dispatch__, a fake, functional
// or functorch-wrapped tensor.
bool belongs_to_layer(const at::Tensor& tensor);

// A scope in which no layer sees the operators that the current thread calls.
class OutsideLayers {
 public:
  OutsideLayers();

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace funcol
