// Layers of PyTorch that watch or rewrite what runs: dispatch modes (FakeTensor, make_fx, CommDebugMode),
// tensor subclasses, functorch transforms, functionalization, torch.jit.trace.
//
// Under a layer, collectives are emitted as PyTorch's own _c10d_functional ops, which every layer knows,
// and no pending tensors are made.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace funcol {

// A layer is active on this thread.
bool has_active_layers();

// One of those layers is a transform of functorch: grad, vmap, jvp.
bool has_active_transforms();

// `tensor` itself belongs to a layer: a subclass with __torch_dispatch__, a fake, functional or
// functorch-wrapped tensor.
bool belongs_to_layer(const at::Tensor& tensor);

// While one of these lives, no layer sees the operators that the current thread calls.
class OutsideLayers {
 public:
  OutsideLayers();

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace funcol
