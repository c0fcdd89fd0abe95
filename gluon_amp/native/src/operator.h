// What an operator of this library is made of. interface.cc shows operators to MXNet, operator.cc lists them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "vector.h"

namespace gluon_amp {

// MXNet's numbers of data types. Data is float32 or bfloat16.
enum Type : int { kFloat32 = 0, kInt32 = 4, kBfloat16 = 12, kUnknownType = -1 };

// A dense array in row-major order. MXNet owns the memory; slices need not be aligned.
struct Tensor {
  void* data;
  const int64_t* shape;
  int ndim;
  int type;
  size_t version;  // how often MXNet has written the array; 0 says that this is a temporary copy of it

  int64_t size() const;
  int64_t item() const { return type == kBfloat16 ? 2 : 4; }  // bytes of a value
  int64_t dim(int axis) const { return shape[axis < 0 ? axis + ndim : axis]; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

using Tensors = std::vector<Tensor>;

// Copy values of an array into one of its type, and set all values of an array, or of arrays from one on, to 0.
void copy(const Tensor& from, int64_t from_begin, const Tensor& to, int64_t to_begin, int64_t count);
void clear(const Tensor& array);
void clear(const Tensors& arrays, size_t first = 0);

using Shape = std::vector<uint32_t>;
using Shapes = std::vector<Shape>;
using Types = std::vector<int>;

// A node's attributes. Names that an operator does not ask for are the graph's business and mean nothing here.
class Attributes {
 public:
  Attributes(const char* const* keys, const char* const* values, int count)
      : keys_(keys), values_(values), count_(count) {}

  // Values in any of Python's spellings. The second argument is the default; without one the attribute is required.
  double number(const char* name) const;
  double number(const char* name, double otherwise) const;
  float real(const char* name) const { return static_cast<float>(number(name)); }
  float real(const char* name, double otherwise) const { return static_cast<float>(number(name, otherwise)); }
  int integer(const char* name, int otherwise) const;
  int count(const char* name) const;  // at least 1, the default
  bool flag(const char* name, bool otherwise) const;
  std::string text(const char* name) const { return require(name); }
  std::string text(const char* name, const char* otherwise) const {
    const char* value = find(name);
    return value ? value : otherwise;
  }
  std::vector<double> numbers(const char* name) const;
  // Two whole numbers; the second argument stands for an empty tuple.
  std::vector<int64_t> pair(const char* name, const std::vector<int64_t>& otherwise) const;

 private:
  const char* find(const char* name) const;
  const char* require(const char* name) const;

  const char* const* keys_;
  const char* const* values_;
  int count_;
};

struct Arity {
  int inputs, outputs;
};

// Functions throw std::exception; MXNet raises an MXNetError with its text.
struct Operator {
  using Compute = void (*)(const Attributes&, const Tensors& inputs, const Tensors& outputs);

  const char* name;
  Arity (*arity)(const Attributes&);
  // Types and shapes of inputs may be filled in as well. Types that are not known yet are kUnknownType.
  void (*types)(const Attributes&, Types& inputs, Types& outputs);
  void (*shapes)(const Attributes&, Shapes& inputs, Shapes& outputs);
  Compute forward;
  // Takes the gradients of the outputs, the inputs and the outputs; gives the gradients of the inputs. Null where
  // there is none. MXNet does not say which gradients are wanted, nor that one is to be added (see README.md).
  Compute backward = nullptr;
  // The inputs that forward writes to; null where there are none.
  std::vector<int> (*mutated)(const Attributes&) = nullptr;
};

// The operators of the library; the last ones need oneDNN when they run.
extern const Operator layer_norm, dropout, gelu, swish, prelu, softmax_op, log_softmax_op, clip, hard_swish,
    channel_means, scale_channels, scale_rows, batch_norm, pooling, resize, all_finite, box_nms, sum_op, mean_op, sgd,
    sgd_momentum, nag, adam, adamw, lamb, attention, batch_dot, convolution, dense, rnn;
const std::vector<const Operator*>& operators();

// Throw an error made of all arguments.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

std::string describe(const Shape& shape);
std::string describe_type(int type);

// The type of a data input: float32 or bfloat16, float32 where nothing is known.
int data_type(int type, const char* name);
// Let an input have a type, or fail when it has another one.
void expect_type(int& type, int expected, const char* name);
// The arity of an operator with one output, and the types of one with one input, in float32 or in both types.
template <int kInputs>
Arity takes(const Attributes&) {
  return {kInputs, 1};
}
void float32_types(const Attributes&, Types& inputs, Types& outputs);
void data_types(const Attributes&, Types& inputs, Types& outputs);
// The types of a layer: data, and a float32 weight and maybe bias.
void layer_types(const Attributes&, Types& inputs, Types& outputs);

// Let an input have a shape, or fail when it has another one.
void expect_shape(Shape& shape, const Shape& expected, const char* name);
// Fail unless all dimensions are known.
void expect_known(const Shape& shape, const char* name);

// Memory for results that nobody needs after an operator, apart from others by the type given. It belongs to the
// thread, until its next call: fresh memory would have to be cleared by the system every time.
template <class Use>
void* scratch(size_t bytes) {
  constexpr size_t kCacheLine = 64;
  thread_local std::vector<char> memory;
  if (memory.size() < bytes + kCacheLine) memory = std::vector<char>(bytes + kCacheLine);
  void* start = memory.data();
  size_t room = memory.size();
  return std::align(kCacheLine, bytes, start, room);
}

// Run a function for every range of [0, count), on all threads. The ranges do not depend on the number of threads.
void parallel_ranges(int64_t count, int64_t range, const std::function<void(int64_t begin, int64_t end)>& run);

// Run a function for every piece of so many values, on all threads, each of which takes about `range` values at once.
template <class Run>
void for_pieces(int64_t count, int64_t values, int64_t range, const Run& run) {
  parallel_ranges(count, std::max<int64_t>(1, range / std::max<int64_t>(1, values)), [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) run(piece);
  });
}

// How many values lie behind one along an axis: 1 for the last one.
inline int64_t values_behind(const Tensor& data, int axis) {
  int64_t product = 1;
  for (int i = (axis < 0 ? axis + data.ndim : axis) + 1; i < data.ndim; ++i) product *= data.shape[i];
  return product;
}

// Run a function for up to `width` of the columns along an axis at a time, so that memory is read in order, with where
// they begin and how many they are. A column has `length` values that are `distance` apart.
template <class Run>
void for_columns(const Tensor& data, int64_t length, int64_t distance, int64_t width, int64_t range, const Run& run) {
  if (!data.size()) return;
  const int64_t slices = data.size() / (length * distance), blocks = (distance + width - 1) / width;
  for_pieces(slices * blocks, length * std::min(width, distance), range, [&](int64_t i) {
    const int64_t first = i % blocks * width;
    run(i / blocks * length * distance + first, std::min(width, distance - first));
  });
}

}  // namespace gluon_amp
