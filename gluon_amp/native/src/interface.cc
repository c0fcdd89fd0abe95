// The library's side of MXNet's interface for operators: the C functions that MXLoadLib looks up by name.
//
// MXNet takes function pointers from _opRegGet and hands them back as the first argument of _opCall*, without ever
// calling them: here they point to the functions of an Operator.
#include <cstdlib>
#include <cstring>
#include <exception>

#include "operator.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace gluon_amp;

constexpr int kInterfaceVersion = 11;  // MX_LIBRARY_VERSION of MXNet 1.9.1
constexpr int kMxnetVersion = 10901;
constexpr int kSuccess = 1, kFailure = 0;

using Function = void (*)();

// MXNet asks for messages on the thread that made the failing call, and after calls that succeeded, too.
thread_local std::string message;

template <class Body>
int guarded(const Body& body) {
  message.clear();
  try {
    body();
    return kSuccess;
  } catch (const std::exception& error) {
    message = error.what();
  } catch (...) {
    message = "unknown error";
  }
  return kFailure;
}

template <class Result>
Result function_as(Function function) {
  return reinterpret_cast<Result>(function);
}

template <class Source>
Function as_function(Source source) {
  return reinterpret_cast<Function>(source);
}

// MXNet frees what it gets with _opCallFree.
template <class T>
T* allocate(size_t count) {
  void* memory = std::calloc(count ? count : 1, sizeof(T));
  if (!memory) throw std::bad_alloc();
  return static_cast<T*>(memory);
}

Shapes read_shapes(unsigned** shapes, const int* dims, int count) {
  Shapes result(count);
  for (int i = 0; i < count; ++i)
    if (dims[i] > 0) result[i].assign(shapes[i], shapes[i] + dims[i]);
  return result;
}

void write_shapes(const Shapes& shapes, unsigned*** written, int** dims) {
  *written = allocate<unsigned*>(shapes.size());
  *dims = allocate<int>(shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    (*written)[i] = allocate<unsigned>(shapes[i].size());
    (*dims)[i] = static_cast<int>(shapes[i].size());
    std::copy(shapes[i].begin(), shapes[i].end(), (*written)[i]);
  }
}

Tensors read_tensors(const int64_t** shapes, const int* dims, void** data, const int* types, const size_t* versions,
                     int count) {
  Tensors result;
  result.reserve(count);
  for (int i = 0; i < count; ++i) result.push_back({data[i], shapes[i], dims[i], types[i], versions[i]});
  return result;
}

}  // namespace

EXPORT int _opVersion() { return kInterfaceVersion; }

EXPORT int initialize(int version) {
  return guarded([&] {
    if (version != kMxnetVersion) fail("made for MXNet ", kMxnetVersion, ", received version=", version);
  });
}

EXPORT int _msgSize() { return message.empty() ? 0 : 1; }

EXPORT int _msgGet(int, const char** text) {
  *text = message.c_str();
  return kSuccess;
}

EXPORT int _opRegSize() { return static_cast<int>(operators().size()); }

EXPORT void _opRegGet(int index, const char** name, int* is_subgraph, const char*** forward_contexts,
                      Function** forwards, int* forward_count, const char*** backward_contexts, Function** backwards,
                      int* backward_count, const char*** state_contexts, Function** states, int* state_count,
                      Function* arity, Function* types, Function* storage_types, Function* shapes, Function* mutated) {
  static const char* cpu[] = {"cpu"};
  static std::vector<Function> forward(operators().size()), backward(operators().size());
  const Operator& op = *operators()[index];
  forward[index] = as_function(op.forward);
  backward[index] = as_function(op.backward);
  *name = op.name;
  *is_subgraph = 0;
  *forward_contexts = *backward_contexts = *state_contexts = cpu;
  *forwards = &forward[index];
  *forward_count = 1;
  *backwards = &backward[index];
  *backward_count = op.backward ? 1 : 0;
  *states = nullptr;
  *state_count = 0;
  *arity = as_function(op.arity);
  *types = as_function(op.types);
  *storage_types = as_function(op.types);  // any function: _opCallInferSType treats all operators alike
  *shapes = as_function(op.shapes);
  *mutated = as_function(op.mutated);
}

EXPORT void _opCallFree(void* memory) { std::free(memory); }

EXPORT int _opCallParseAttrs(Function function, const char* const* keys, const char* const* values, int count,
                             int* inputs, int* outputs) {
  return guarded([&] {
    const Arity arity = function_as<decltype(Operator::arity)>(function)({keys, values, count});
    *inputs = arity.inputs;
    *outputs = arity.outputs;
  });
}

EXPORT int _opCallInferShape(Function function, const char* const* keys, const char* const* values, int count,
                             unsigned** in_shapes, int* in_dims, int in_count, unsigned*** new_in_shapes,
                             int** new_in_dims, unsigned*** out_shapes, int** out_dims, int out_count) {
  return guarded([&] {
    Shapes inputs = read_shapes(in_shapes, in_dims, in_count), outputs(out_count);
    function_as<decltype(Operator::shapes)>(function)({keys, values, count}, inputs, outputs);
    write_shapes(inputs, new_in_shapes, new_in_dims);
    write_shapes(outputs, out_shapes, out_dims);
  });
}

EXPORT int _opCallInferType(Function function, const char* const* keys, const char* const* values, int count,
                            int* in_types, int in_count, int* out_types, int out_count) {
  return guarded([&] {
    Types inputs(in_types, in_types + in_count), outputs(out_count, kUnknownType);
    function_as<decltype(Operator::types)>(function)({keys, values, count}, inputs, outputs);
    std::copy(inputs.begin(), inputs.end(), in_types);
    std::copy(outputs.begin(), outputs.end(), out_types);
  });
}

// Dense arrays only. MXNet's own rule for operators without this function does not allow for operators without outputs.
EXPORT int _opCallInferSType(Function, const char* const*, const char* const*, int, int* in_types, int in_count,
                             int* out_types, int out_count) {
  return guarded([&] {
    for (int i = 0; i < in_count; ++i)
      if (in_types[i] > 0) fail("expected dense arrays, received input ", i, " of storage type ", in_types[i]);
    std::fill_n(in_types, in_count, 0);
    std::fill_n(out_types, out_count, 0);
  });
}

EXPORT int _opCallMutateInputs(Function function, const char* const* keys, const char* const* values, int count,
                               int** indices, int* indices_count) {
  return guarded([&] {
    // MXNet copies these at once, and does not free them.
    thread_local std::vector<int> mutated;
    mutated = function_as<decltype(Operator::mutated)>(function)({keys, values, count});
    *indices = mutated.data();
    *indices_count = static_cast<int>(mutated.size());
  });
}

EXPORT int _opCallFCompute(Function function, const char* const* keys, const char* const* values, int count,
                           const int64_t** in_shapes, int* in_dims, void** in_data, int* in_types, size_t* in_versions,
                           const char**, int*, int in_count, const int64_t** out_shapes, int* out_dims, void** out_data,
                           int* out_types, size_t* out_versions, const char**, int*, int out_count, void*, void*, void*,
                           void*, void*, void*, void*, int*, int*, void**, void**, void**, void**, int64_t*, int64_t*,
                           int64_t*, int64_t*, void*, void*) {
  return guarded([&] {
    function_as<Operator::Compute>(function)(
        {keys, values, count}, read_tensors(in_shapes, in_dims, in_data, in_types, in_versions, in_count),
        read_tensors(out_shapes, out_dims, out_data, out_types, out_versions, out_count));
  });
}

// There are no partitioners and no graph passes, and no stateful operators. MXNet looks up the functions
// for them all the same, and never calls them when the sizes are 0.
EXPORT int _partRegSize() { return 0; }
EXPORT int _passRegSize() { return 0; }

#define NEVER_CALLED(name) \
  EXPORT int name() { return kFailure; }
NEVER_CALLED(_opCallCreateOpState)
NEVER_CALLED(_opCallDestroyOpState)
NEVER_CALLED(_opCallFStatefulCompute)
NEVER_CALLED(_partRegGetCount)
NEVER_CALLED(_partRegGet)
NEVER_CALLED(_partCallSupportedOps)
NEVER_CALLED(_partCallCreateSelector)
NEVER_CALLED(_partCallSelect)
NEVER_CALLED(_partCallSelectInput)
NEVER_CALLED(_partCallSelectOutput)
NEVER_CALLED(_partCallFilter)
NEVER_CALLED(_partCallReset)
NEVER_CALLED(_partCallReviewSubgraph)
NEVER_CALLED(_passRegGet)
NEVER_CALLED(_passCallGraphPass)
