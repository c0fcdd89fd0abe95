// oneDNN 3 by its C interface, and products of matrices by it. It is looked up in libdnnl.so.3 at run time: it need not
// be there when the library is built or loaded. libmxnet.so has a oneDNN of its own, another version.
#pragma once

#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "operator.h"

namespace gluon_amp::onednn {

// Opaque, and of the names and values that oneDNN's headers give them.
struct Engine;
struct Stream;
struct MemoryDesc;
struct Memory;
struct PrimitiveDesc;
struct PrimitiveHandle;
struct PostOps;
struct Attr;
using Md = const MemoryDesc*;
struct Version {
  int major, minor, patch;
};
struct Argument {
  int kind;
  Memory* memory;
};

enum DataType { kBf16 = 2, kF32 = 3 };
enum Prop { kForwardTraining = 64 };
enum Algorithm { kDirect = 1, kLinear = 38 };
enum Query { kImplementation = 8, kWeights = 131, kDiffWeights = 132, kScratchpad = 136 };
constexpr int kAny = 1;  // the tag of a layout that oneDNN chooses
enum Kind {
  kSrc = 1,
  kDst = 17,
  kWeightsLayer = 33,
  kBias = 41,
  kScratchpadData = 80,
  kDiffSrc = 129,
  kDiffDst = 145,
  kDiffWeightsLayer = 161,
  kDiffBias = 169,
};

// The functions that are used: result, name, parameters. Results are 0 where they succeed.
#define FOR_FUNCTIONS(F)                                                                                           \
  F(const Version*, version, ())                                                                                   \
  F(int, engine_create, (Engine**, int kind, size_t index))                                                        \
  F(int, stream_create, (Stream**, Engine*, unsigned flags))                                                       \
  F(int, stream_wait, (Stream*))                                                                                   \
  F(int, stream_destroy, (Stream*))                                                                                \
  F(int, memory_desc_create_with_strides,                                                                          \
    (MemoryDesc**, int ndims, const int64_t* dims, int type, const int64_t* strides))                              \
  F(int, memory_desc_create_with_tag, (MemoryDesc**, int ndims, const int64_t* dims, int type, int tag))           \
  F(int, memory_desc_destroy, (MemoryDesc*))                                                                       \
  F(size_t, memory_desc_get_size, (Md))                                                                            \
  F(int, memory_desc_equal, (Md, Md))                                                                              \
  F(int, memory_create, (Memory**, Md, Engine*, void* data))                                                       \
  F(int, memory_destroy, (Memory*))                                                                                \
  F(int, primitive_attr_create, (Attr**))                                                                          \
  F(int, primitive_attr_set_scratchpad_mode, (Attr*, int mode))                                                    \
  F(int, primitive_attr_set_post_ops, (Attr*, const PostOps*))                                                     \
  F(int, primitive_attr_destroy, (Attr*))                                                                          \
  F(int, post_ops_create, (PostOps**))                                                                             \
  F(int, post_ops_append_eltwise, (PostOps*, int algorithm, float alpha, float beta))                              \
  F(int, post_ops_append_sum, (PostOps*, float scale, int32_t zero_point, int type))                               \
  F(int, post_ops_destroy, (PostOps*))                                                                             \
  F(Md, primitive_desc_query_md, (const PrimitiveDesc*, int what, int index))                                      \
  F(int, primitive_desc_query, (const PrimitiveDesc*, int what, int index, void* result))                          \
  F(int, primitive_desc_next_impl, (PrimitiveDesc*))                                                               \
  F(int, primitive_desc_destroy, (PrimitiveDesc*))                                                                 \
  F(int, primitive_create, (PrimitiveHandle**, const PrimitiveDesc*))                                              \
  F(int, primitive_destroy, (PrimitiveHandle*))                                                                    \
  F(int, primitive_execute, (const PrimitiveHandle*, Stream*, int count, const Argument*))                         \
  F(int, reorder_primitive_desc_create, (PrimitiveDesc**, Md from, Engine*, Md to, Engine*, const Attr*))          \
  F(int, matmul_primitive_desc_create, (PrimitiveDesc**, Engine*, Md, Md, Md bias, Md, const Attr*))               \
  F(int, inner_product_forward_primitive_desc_create,                                                              \
    (PrimitiveDesc**, Engine*, int prop, Md, Md, Md bias, Md, const Attr*))                                        \
  F(int, inner_product_backward_weights_primitive_desc_create,                                                     \
    (PrimitiveDesc**, Engine*, Md, Md, Md bias, Md, const PrimitiveDesc*, const Attr*))                            \
  F(int, convolution_forward_primitive_desc_create,                                                                \
    (PrimitiveDesc**, Engine*, int prop, int algorithm, Md, Md, Md bias, Md, const int64_t* strides,               \
     const int64_t* dilates, const int64_t* pads, const int64_t* end_pads, const Attr*))                           \
  F(int, convolution_backward_data_primitive_desc_create,                                                          \
    (PrimitiveDesc**, Engine*, int algorithm, Md, Md, Md, const int64_t*, const int64_t*, const int64_t*,          \
     const int64_t*, const PrimitiveDesc*, const Attr*))                                                           \
  F(int, convolution_backward_weights_primitive_desc_create,                                                       \
    (PrimitiveDesc**, Engine*, int algorithm, Md, Md, Md bias, Md, const int64_t*, const int64_t*, const int64_t*, \
     const int64_t*, const PrimitiveDesc*, const Attr*))

struct Functions {
#define DECLARE(result, name, parameters) result(*name) parameters;
  FOR_FUNCTIONS(DECLARE)
#undef DECLARE
};

// oneDNN's functions; fails where it cannot be loaded or is another version.
const Functions& functions();
Engine* engine();
// Fail with a message about what was tried unless a function of oneDNN succeeded.
void check(int status, const char* what);

using Dims = std::vector<int64_t>;

// A description of an array's memory.
class Desc {
 public:
  Desc(const Dims& dims, DataType type, const Dims& strides);
  Desc(const Dims& dims, DataType type);             // row-major
  static Desc any(const Dims& dims, DataType type);  // as oneDNN likes it
  operator Md() const { return desc_.get(); }

 private:
  explicit Desc(MemoryDesc* desc);
  std::shared_ptr<MemoryDesc> desc_;
};

// An array to run a primitive with.
struct Array {
  int kind;
  Md desc;
  const void* data;
};

size_t bytes(Md desc);
bool are_equal(Md one, Md other);

// A primitive and its description. It never changes and holds no memory for results: threads may share it.
class Primitive {
 public:
  // The function makes the description. `scale` multiplies the result; with `adds` it is added to what is there. Of
  // oneDNN's implementations the first one is taken whose name begins with `preferred`, or else the first one.
  Primitive(const char* what, const std::function<int(PrimitiveDesc**, const Attr*)>& make, float scale = 1,
            bool adds = false, const char* preferred = "");
  Md query(Query what, int index = 0) const;
  const PrimitiveDesc* desc() const { return desc_.get(); }
  void run(std::initializer_list<Array> arrays) const;

 private:
  std::shared_ptr<PrimitiveDesc> desc_;
  std::shared_ptr<PrimitiveHandle> handle_;
};

// What was made for a key before, or is made now. Too many of them are all forgotten: shapes may never come again.
template <class T>
std::shared_ptr<const T> cached(const Dims& key, const std::function<T()>& make) {
  static std::mutex mutex;
  static std::map<Dims, std::shared_ptr<const T>> made;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = made.find(key);
  if (found != made.end()) return found->second;
  if (made.size() >= 512) made.clear();
  return made[key] = std::make_shared<const T>(make());
}

// Bring an array into another order or type: into memory of the thread, until its next call, unless a target is given.
const void* reordered(const Dims& key, Md from, const void* values, Md to, void* target = nullptr);

inline DataType data_type_of(int type) { return type == kBfloat16 ? kBf16 : kF32; }

}  // namespace gluon_amp::onednn

namespace gluon_amp {

// A pile of matrices: equal leading dimensions, then rows and columns, anywhere in an array.
struct Matrices {
  Matrices(void* start, int kind, onednn::Dims sizes, onednn::Dims steps)
      : data(start), type(kind), dims(std::move(sizes)), strides(std::move(steps)) {}
  // Row-major ones, all leading dimensions taken together.
  explicit Matrices(const Tensor& tensor);

  int64_t rows() const { return dims[dims.size() - 2]; }
  int64_t columns() const { return dims.back(); }
  Matrices transposed() const;
  Matrices transposed_if(bool wanted) const { return wanted ? transposed() : *this; }

  int64_t item() const { return type == kBfloat16 ? 2 : 4; }  // bytes of a value
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  void* data;
  int type;
  onednn::Dims dims, strides;
};

// The data of a layer, or what it gives, as one matrix.
Matrices as_matrix(const Tensor& tensor, int64_t columns);

// Write alpha * a * b. The piles have equal leading dimensions; a and b are of one type.
void multiply(const Matrices& a, const Matrices& b, const Matrices& product, float alpha = 1);

// Write a * b, of one pair of matrices of which b is float32 and rounded to the type of a. A bias, in float32, is added
// to every row.
void multiply_rounded(const Matrices& a, const Matrices& b, const Matrices& product, const float* bias = nullptr);

// Write the gradients of a dense layer's float32 weight, columns of grad times columns of data, and of its bias.
void add_up(const Matrices& grad, const Matrices& data, float* weight_grad, float* bias_grad);

}  // namespace gluon_amp
