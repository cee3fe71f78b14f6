// Views, and copies that move elements.
#include <algorithm>
#include <limits>

#include "layout/naive_shards.h"
#include "propagation/operators.h"

namespace funcol::test {
namespace {

// A result of this shape whose element `index` is element source(index) of the tensor.
Numbers moved(const Numbers& input, const Shape& shape, const std::function<Index(const Index&)>& source) {
  return made(shape, [&](const Index& index) { return at(input, source(index)); });
}

Numbers reshaped(const Numbers& input, const Shape& shape) {
  need(num_elements(shape) == std::ssize(input.values), "a view of other elements");
  return {shape, input.values};
}

Kernel view_kernel() {
  return [](const std::vector<Numbers>& inputs, const std::vector<Shape>& shapes) {
    return std::vector{reshaped(inputs.at(0), shapes.at(0))};
  };
}

// The sizes of `shape` joined and split anew.
Shape another_shape(Bytes& bytes, Shape shape) {
  for (int64_t changes = bytes.between(1, 3); changes > 0; --changes) {
    const auto dim = bytes.below(std::ssize(shape) + 1);
    const bool splits = bytes.coin();
    if (dim == std::ssize(shape)) {
      shape.push_back(1);
    } else if (splits) {
      for (const int64_t factor : {2, 3, 5, 7}) {
        if (shape[dim] > 0 && shape[dim] % factor == 0) {
          shape[dim] /= factor;
          shape.insert(shape.begin() + dim, factor);
          break;
        }
      }
    } else if (dim + 1 < std::ssize(shape)) {
      shape[dim] *= shape[dim + 1];
      shape.erase(shape.begin() + dim + 1);
    }
  }
  return shape;
}

Case view(Bytes& bytes) {
  const Shape from = some_shape(bytes);
  const Shape to = bytes.below(6) == 1 ? from : another_shape(bytes, from);
  const auto op = bytes.one_of<std::string>({"aten::view", "aten::_unsafe_view", "aten::reshape"});
  auto made = CaseMaker(bytes, op)
                  .with("self", from)
                  .with_value(op == "aten::reshape" ? "shape" : "size", integers(to))
                  .gives(view_kernel(), {to});
  made.changes_nothing = from == to;
  return made;
}

Case squeeze(Bytes& bytes) {
  const Shape from = some_shape(bytes);
  std::vector<int64_t> dims;
  Shape to;
  const bool names_dims = bytes.coin();
  for (int64_t dim = 0; dim < std::ssize(from); ++dim) {
    const bool is_named = bytes.coin();
    if (is_named) {
      dims.push_back(dim);
    }
    if (from[dim] != 1 || (names_dims && !is_named)) {
      to.push_back(from[dim]);
    }
  }
  CaseMaker maker(bytes, names_dims ? "aten::squeeze.dims" : "aten::squeeze");
  maker.with("self", from);
  if (names_dims) {
    maker.with_value("dim", integers(dims));
  }
  return maker.gives(view_kernel(), {to});
}

Case unsqueeze(Bytes& bytes) {
  const Shape from = some_shape(bytes, 0);
  const int64_t dim = bytes.below(std::ssize(from) + 1);
  return CaseMaker(bytes, "aten::unsqueeze")
      .with("self", from)
      .with_value("dim", dim)
      .gives(plain([=](const std::vector<Numbers>& inputs) {
        Shape shape = inputs[0].shape;
        shape.insert(shape.begin() + dim, 1);
        return reshaped(inputs[0], shape);
      }));
}

Case expand(Bytes& bytes) {
  Shape from = some_shape(bytes);
  Shape to = from;
  for (size_t dim = 0; dim < from.size(); ++dim) {
    from[dim] = bytes.coin() ? 1 : from[dim];
  }
  if (bytes.coin()) {
    to.insert(to.begin(), 2);
  }
  return CaseMaker(bytes, "aten::expand")
      .with("self", from)
      .with_value("size", integers(to))
      .with_value("implicit", false)
      .gives(
          [](const std::vector<Numbers>& inputs, const std::vector<Shape>& shapes) {
            const Numbers result{shapes.at(0), {}};
            need(broadcast_shape({inputs[0], result}) == result.shape, "an expansion to other sizes");
            return std::vector{
                made(result.shape, [&](const Index& index) { return broadcast_at(inputs[0], index); })};
          },
          {to});
}

Kernel permuted(const std::vector<int64_t>& dims) {
  return plain([=](const std::vector<Numbers>& inputs) {
    Shape shape;
    for (const int64_t dim : dims) {
      shape.push_back(size_of(inputs[0], dim));
    }
    return moved(inputs[0], shape, [&](const Index& index) {
      Index source(index.size());
      for (size_t dim = 0; dim < dims.size(); ++dim) {
        source[dims[dim]] = index[dim];
      }
      return source;
    });
  });
}

Case permutation(Bytes& bytes) {
  const Shape from = some_shape(bytes);
  std::vector<int64_t> dims = counted(std::ssize(from));
  if (bytes.coin()) {
    const int64_t first = bytes.below(std::ssize(from));
    const int64_t second = bytes.below(std::ssize(from));
    std::swap(dims[first], dims[second]);
    return CaseMaker(bytes, "aten::transpose.int")
        .with("self", from)
        .with_value("dim0", first)
        .with_value("dim1", second)
        .gives(permuted(dims));
  }
  bytes.shuffle(dims);
  return CaseMaker(bytes, "aten::permute")
      .with("self", from)
      .with_value("dims", integers(dims))
      .gives(permuted(dims));
}

// The result has dim `dim` cut, and its index along it comes from source(index, size).
Kernel along(int64_t dim, const std::function<int64_t(int64_t)>& new_size,
             const std::function<int64_t(int64_t index, int64_t size)>& source) {
  return plain([=](const std::vector<Numbers>& inputs) {
    Shape shape = inputs[0].shape;
    const int64_t size = size_of(inputs[0], dim);
    shape[dim] = new_size(size);
    return moved(inputs[0], shape, [&](Index index) {
      index[dim] = source(index[dim], size);
      return index;
    });
  });
}

Case slice(Bytes& bytes) {
  const Shape from = some_shape(bytes);
  const int64_t dim = bytes.below(std::ssize(from));
  const int64_t start = bytes.below(4) == 1 ? bytes.below(from[dim] + 1) : 0;
  const int64_t end = bytes.coin() ? std::numeric_limits<int64_t>::max() : bytes.between(start, from[dim]);
  const int64_t step = bytes.below(4) == 1 ? 2 : 1;
  return CaseMaker(bytes, "aten::slice.Tensor")
      .with("self", from)
      .with_value("dim", dim)
      .with_value("start", start)
      .with_value("end", end)
      .with_value("step", step)
      .gives(along(
          dim,
          [=](int64_t size) {
            return std::max<int64_t>(0, (std::min(end, size) - std::min(start, size) + step - 1) / step);
          },
          [=](int64_t index, int64_t) { return start + index * step; }));
}

Case select(Bytes& bytes) {
  Shape from = some_shape(bytes);
  const int64_t dim = bytes.below(std::ssize(from));
  from[dim] = std::max<int64_t>(from[dim], 1);
  const int64_t place = bytes.below(from[dim]);
  return CaseMaker(bytes, "aten::select.int")
      .with("self", from)
      .with_value("dim", dim)
      .with_value("index", place)
      .gives(plain([=](const std::vector<Numbers>& inputs) {
        need(place < size_of(inputs[0], dim), "no such index");
        Shape shape = inputs[0].shape;
        shape.erase(shape.begin() + dim);
        return moved(inputs[0], shape, [&](Index index) {
          index.insert(index.begin() + dim, place);
          return index;
        });
      }));
}

Case turned(Bytes& bytes) {
  const Shape from = some_shape(bytes);
  const int64_t dim = bytes.below(std::ssize(from));
  const auto same = [](int64_t size) { return size; };
  if (bytes.coin()) {
    return CaseMaker(bytes, "aten::flip")
        .with("self", from)
        .with_value("dims", integers({dim}))
        .gives(along(dim, same, [](int64_t index, int64_t size) { return size - 1 - index; }));
  }
  return CaseMaker(bytes, "aten::roll")
      .with("self", from)
      .with_value("shifts", integers({1}))
      .with_value("dims", integers({dim}))
      .gives(along(dim, same, [](int64_t index, int64_t size) { return (index + size - 1) % size; }));
}

Case split(Bytes& bytes) {
  const Shape from = some_shape(bytes);
  const int64_t dim = bytes.below(std::ssize(from));
  const int64_t length = bytes.between(1, 4);
  CaseMaker maker(bytes, "aten::split.Tensor");
  maker.with("self", from).with_value("split_size", length).with_value("dim", dim);
  auto made = maker.gives([=](const std::vector<Numbers>& inputs, const std::vector<Shape>&) {
    std::vector<Numbers> parts;
    const int64_t size = size_of(inputs[0], dim);
    for (int64_t begin = 0; begin == 0 || begin < size; begin += length) {
      Shape shape = inputs[0].shape;
      shape[dim] = std::min(length, size - begin);
      parts.push_back(moved(inputs[0], shape, [&](Index index) {
        index[dim] += begin;
        return index;
      }));
    }
    return parts;
  });
  for (auto& output : made.call.outputs) {
    output->dtype = Dtype::kFloat32;
  }
  return made;
}

Case triangle(Bytes& bytes) {
  const Shape from = some_shape(bytes, 2);
  return CaseMaker(bytes, "aten::tril")
      .with("self", from)
      .with_value("diagonal", int64_t{0})
      .gives(plain([](const std::vector<Numbers>& inputs) {
        return made(inputs[0].shape, [&](const Index& index) {
          return index.back() <= index[index.size() - 2] ? at(inputs[0], index) : 0;
        });
      }));
}

Case repeat(Bytes& bytes) {
  const Shape from = some_shape(bytes, 1, 2);
  std::vector<int64_t> repeats;
  for (size_t dim = 0; dim < from.size(); ++dim) {
    repeats.push_back(bytes.between(1, 2));
  }
  return CaseMaker(bytes, "aten::repeat")
      .with("self", from)
      .with_value("repeats", integers(repeats))
      .gives(plain([=](const std::vector<Numbers>& inputs) {
        Shape shape = inputs[0].shape;
        for (size_t dim = 0; dim < shape.size(); ++dim) {
          shape[dim] *= repeats[dim];
        }
        return moved(inputs[0], shape, [&](Index index) {
          for (size_t dim = 0; dim < index.size(); ++dim) {
            index[dim] %= inputs[0].shape[dim];
          }
          return index;
        });
      }));
}

}  // namespace

Case view_case(Bytes& bytes) {
  using Make = Case (*)(Bytes&);
  return bytes.one_of<Make>({view, permutation, view, squeeze, unsqueeze, expand, slice, select, turned,
                             split, triangle, repeat})(bytes);
}

}  // namespace funcol::test
