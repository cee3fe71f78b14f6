// The group of a layer that FSDP2 shards over four ranks, and C++ that knows FSDP2's classes. Skips on
// releases before 2.15, whose groups are PyTorch's own to run.
#pragma once

#include <gtest/gtest.h>
#include <torch/version.h>

#include "fsdp/param_group_view.h"
#include "support/python.h"

namespace funcol::test {

class FullyShard : public ::testing::Test {
 protected:
  FullyShard() {
    const auto kept = [&](const char* expression) { return python(expression, layer).release().ptr(); };
    auto& known = python::fully_shard();
    known.group = reinterpret_cast<PyTypeObject*>(kept("x.group_class"));
    known.param = reinterpret_cast<PyTypeObject*>(kept("x.classes.FSDPParam"));
    known.sharded = kept("x.states.SHARDED");
    known.sharded_post_forward = kept("x.states.SHARDED_POST_FORWARD");
    known.unsharded = kept("x.states.UNSHARDED");
    known.alloc_storage = kept("x.classes.alloc_storage");
    known.free_storage = kept("x.classes.free_storage");
    known.module_setattr = kept("torch.nn.Module.__setattr__");
  }

  void SetUp() override {
    if (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15) {
      GTEST_SKIP() << "PyTorch " << TORCH_VERSION << " runs its groups itself";
    }
  }

  bool holds(const char* expression) const { return test::python(expression, layer).cast<bool>(); }

  py::object layer = test::python("GroupOfALayer()");
  py::object group = layer.attr("group");
};

}  // namespace funcol::test
