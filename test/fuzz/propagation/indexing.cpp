// Operators that read or write the elements at given indices.
#include "propagation/operators.h"

namespace funcol::test {
namespace {

int64_t index_at(const Numbers& indices, const Index& where) {
  return static_cast<int64_t>(at(indices, where));
}

void check_indices(const Numbers& indices, int64_t end) {
  for (const double index : indices.values) {
    need(index >= 0 && index < static_cast<double>(end), "an index outside");
  }
}

// A shape with at least one index along `dim`.
Shape indexed_shape(Bytes& bytes, int64_t& dim) {
  Shape shape = some_shape(bytes);
  dim = bytes.below(std::ssize(shape));
  shape[dim] = std::max<int64_t>(shape[dim], 1);
  return shape;
}

Case index_select(Bytes& bytes) {
  int64_t dim = 0;
  const Shape shape = indexed_shape(bytes, dim);
  return CaseMaker(bytes, "aten::index_select")
      .with("self", shape)
      .with_value("dim", dim)
      .with_indices("index", {bytes.below(6)}, shape[dim])
      .gives(plain([=](const std::vector<Numbers>& inputs) {
        check_indices(inputs[1], size_of(inputs[0], dim));
        Shape result = inputs[0].shape;
        result[dim] = inputs[1].shape.at(0);
        return made(result, [&](Index index) {
          index[dim] = index_at(inputs[1], {index[dim]});
          return at(inputs[0], index);
        });
      }));
}

Case gather(Bytes& bytes) {
  int64_t dim = 0;
  const Shape shape = indexed_shape(bytes, dim);
  Shape index_shape = shape;
  index_shape[dim] = bytes.one_of<int64_t>({1, 2, 1, 4});
  if (bytes.below(4) == 1) {
    const auto other = bytes.below(std::ssize(shape));
    index_shape[other] = other == dim ? index_shape[other] : std::min<int64_t>(index_shape[other], 2);
  }
  return CaseMaker(bytes, "aten::gather")
      .with("self", shape)
      .with_value("dim", dim)
      .with_indices("index", index_shape, shape[dim])
      .with_value("sparse_grad", false)
      .gives(plain([=](const std::vector<Numbers>& inputs) {
        check_indices(inputs[1], size_of(inputs[0], dim));
        for (int64_t other = 0; other < std::ssize(inputs[0].shape); ++other) {
          need(other == dim || inputs[1].shape.at(other) <= inputs[0].shape[other], "an index too large");
        }
        return made(inputs[1].shape, [&](const Index& index) {
          Index source = index;
          source[dim] = index_at(inputs[1], index);
          return at(inputs[0], source);
        });
      }));
}

// index.Tensor(self, [.., indices, ..]) with one index tensor, on `dim`.
Case index(Bytes& bytes) {
  int64_t dim = 0;
  const Shape shape = indexed_shape(bytes, dim);
  const Shape index_shape = some_shape(bytes, 1, 2);
  Argument::List list(dim + 1);
  list.back() = Argument{TensorNumber{1}};
  CaseMaker maker(bytes, "aten::index.Tensor");
  maker.with("self", shape);
  maker.with_indices("indices", index_shape, shape[dim]);
  auto made_case = maker.gives(plain([=](const std::vector<Numbers>& inputs) {
    check_indices(inputs[1], size_of(inputs[0], dim));
    const auto& own = inputs[0].shape;
    const auto& of_index = inputs[1].shape;
    const auto num_index_dims = std::ssize(of_index);
    Shape result(own.begin(), own.begin() + dim);
    result.insert(result.end(), of_index.begin(), of_index.end());
    result.insert(result.end(), own.begin() + dim + 1, own.end());
    return made(result, [&](const Index& index) {
      const Index where(index.begin() + dim, index.begin() + dim + num_index_dims);
      Index source(index.begin(), index.begin() + dim);
      source.push_back(index_at(inputs[1], where));
      source.insert(source.end(), index.begin() + dim + num_index_dims, index.end());
      return at(inputs[0], source);
    });
  }));
  made_case.call.args.back().second = Argument{list};
  return made_case;
}

Case index_add(Bytes& bytes) {
  int64_t dim = 0;
  const Shape shape = indexed_shape(bytes, dim);
  Shape source = shape;
  source[dim] = bytes.below(6);
  return CaseMaker(bytes, "aten::index_add")
      .with("self", shape)
      .with_value("dim", dim)
      .with_indices("index", {source[dim]}, shape[dim])
      .with("source", source)
      .with_value("alpha", int64_t{1})
      .gives(plain([=](const std::vector<Numbers>& inputs) {
        check_indices(inputs[1], size_of(inputs[0], dim));
        Numbers sums = inputs[0];
        Shape expected = inputs[0].shape;
        expected[dim] = inputs[1].shape.at(0);
        need(inputs[2].shape == expected, "a source of other sizes");
        for (int64_t i = 0; i < num_elements(expected); ++i) {
          Index index = index_of(i, expected);
          index[dim] = index_at(inputs[1], {index[dim]});
          sums.values[element_at(index, sums.shape)] += inputs[2].values[i];
        }
        return sums;
      }));
}

// scatter.src writes each element of src once; scatter_add adds them.
Case scatter(Bytes& bytes) {
  int64_t dim = 0;
  Shape shape = indexed_shape(bytes, dim);
  const bool adds = bytes.coin();
  Shape index_shape = shape;
  if (adds) {
    index_shape[dim] = bytes.below(4);
  } else {
    index_shape = Shape(shape.size(), 1);  // one index: no element is written twice
    shape = Shape(shape.size(), 1);
    shape[dim] = 4;
    index_shape[dim] = bytes.between(1, 3);
  }
  return CaseMaker(bytes, adds ? "aten::scatter_add" : "aten::scatter.src")
      .with("self", shape)
      .with_value("dim", dim)
      .with_indices("index", index_shape, shape[dim], !adds)
      .with("src", index_shape)
      .gives(plain([=](const std::vector<Numbers>& inputs) {
        check_indices(inputs[1], size_of(inputs[0], dim));
        need(inputs[1].shape == inputs[2].shape, "an index of other sizes than its source");
        Numbers written = inputs[0];
        for (int64_t i = 0; i < num_elements(inputs[1].shape); ++i) {
          Index index = index_of(i, inputs[1].shape);
          for (int64_t other = 0; other < std::ssize(index); ++other) {
            need(other == dim || index[other] < written.shape[other], "an index too large");
          }
          index[dim] = static_cast<int64_t>(inputs[1].values[i]);
          double& value = written.values[element_at(index, written.shape)];
          value = (adds ? value : 0) + inputs[2].values[i];
        }
        return written;
      }));
}

Case embedding(Bytes& bytes) {
  const int64_t num_rows = bytes.between(1, 9);
  const Shape weight{num_rows, bytes.between(1, 6)};
  return CaseMaker(bytes, "aten::embedding")
      .with("weight", weight)
      .with_indices("indices", some_shape(bytes, 1, 2), num_rows)
      .with_value("padding_idx", int64_t{-1})
      .with_value("scale_grad_by_freq", false)
      .with_value("sparse", false)
      .gives(plain([](const std::vector<Numbers>& inputs) {
        check_indices(inputs[1], size_of(inputs[0], 0));
        Shape result = inputs[1].shape;
        result.push_back(size_of(inputs[0], 1));
        return made(result, [&](Index index) {
          const int64_t column = index.back();
          index.pop_back();
          return at(inputs[0], {index_at(inputs[1], index), column});
        });
      }));
}

}  // namespace

Case indexing_case(Bytes& bytes) {
  using Make = Case (*)(Bytes&);
  return bytes.one_of<Make>({index_select, gather, index, index_add, scatter, embedding})(bytes);
}

}  // namespace funcol::test
