#include "operator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <locale>
#include <mutex>

namespace gluon_amp {

namespace {

constexpr uint32_t kUnknownDimension = UINT32_MAX;

double parse(const std::string& text, const char* name) {
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  double value = 0;
  if (!(stream >> value) || !(stream >> std::ws).eof()) {
    if (text == "inf" || text == "-inf" || text == "nan") return std::strtod(text.c_str(), nullptr);
    fail("expected a number, received ", name, "='", text, "'");
  }
  return value;
}

}  // namespace

const std::vector<const Operator*>& operators() {
  static const std::vector<const Operator*> all{
      &layer_norm, &clip,          &scale_rows,     &dropout,   &gelu,         &swish,
      &prelu,      &softmax_op,    &log_softmax_op, &sgd,       &sgd_momentum, &nag,
      &adam,       &adamw,         &lamb,           &attention, &batch_dot,    &dense,
      &rnn,        &batch_norm,    &convolution,    &pooling,   &resize,       &all_finite,
      &hard_swish, &channel_means, &scale_channels, &box_nms,   &sum_op,       &mean_op};
  return all;
}

int64_t Tensor::size() const {
  int64_t product = 1;
  for (int i = 0; i < ndim; ++i) product *= shape[i];
  return product;
}

void copy(const Tensor& from, int64_t from_begin, const Tensor& to, int64_t to_begin, int64_t count) {
  const char* first = from.as<const char>() + from_begin * from.item();
  std::copy_n(first, count * from.item(), to.as<char>() + to_begin * from.item());
}

void clear(const Tensor& array) { std::fill_n(array.as<char>(), array.size() * array.item(), 0); }

void clear(const Tensors& arrays, size_t first) {
  for (size_t i = first; i < arrays.size(); ++i) clear(arrays[i]);
}

const char* Attributes::find(const char* name) const {
  for (int i = 0; i < count_; ++i)
    if (!std::strcmp(keys_[i], name)) return values_[i];
  return nullptr;
}

const char* Attributes::require(const char* name) const {
  const char* value = find(name);
  if (!value) fail("the attribute ", name, " is missing");
  return value;
}

double Attributes::number(const char* name) const { return parse(require(name), name); }

double Attributes::number(const char* name, double otherwise) const {
  const char* value = find(name);
  return value && std::strcmp(value, "None") ? parse(value, name) : otherwise;
}

int Attributes::integer(const char* name, int otherwise) const {
  const double value = number(name, otherwise);
  if (value != static_cast<int>(value)) fail("expected an integer, received ", name, "=", value);
  return static_cast<int>(value);
}

int Attributes::count(const char* name) const {
  const int value = integer(name, 1);
  if (value < 1) fail("expected a positive number, received ", name, "=", value);
  return value;
}

bool Attributes::flag(const char* name, bool otherwise) const {
  const char* value = find(name);
  if (!value) return otherwise;
  const std::string text(value);
  if (text == "True" || text == "true" || text == "1") return true;
  if (text == "False" || text == "false" || text == "0") return false;
  fail("expected True or False, received ", name, "='", text, "'");
}

std::vector<double> Attributes::numbers(const char* name) const {
  std::string text(require(name));
  for (char bracket : {'[', ']', '(', ')'}) text.erase(std::remove(text.begin(), text.end(), bracket), text.end());
  std::vector<double> result;
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');)
    if (item.find_first_not_of(' ') != std::string::npos) result.push_back(parse(item, name));
  return result;
}

std::vector<int64_t> Attributes::pair(const char* name, const std::vector<int64_t>& otherwise) const {
  const std::string given = text(name, "()");
  if (!otherwise.empty() && (given == "()" || given == "None")) return otherwise;
  const std::vector<double> values = numbers(name);
  if (values.size() != 2) fail("expected two numbers, received ", name, "=", given);
  return {static_cast<int64_t>(values[0]), static_cast<int64_t>(values[1])};
}

std::string describe(const Shape& shape) {
  std::ostringstream text;
  text << "(";
  for (size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "") << shape[i];
  text << ")";
  return text.str();
}

std::string describe_type(int type) {
  static const char* names[] = {"float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool"};
  if (type == kBfloat16) return "bfloat16";
  return type >= 0 && type < 8 ? names[type] : "type " + std::to_string(type);
}

int data_type(int type, const char* name) {
  if (type == kUnknownType) return kFloat32;
  if (type != kFloat32 && type != kBfloat16)
    fail("expected float32 or bfloat16, received ", name, " of ", describe_type(type));
  return type;
}

void expect_type(int& type, int expected, const char* name) {
  if (type != kUnknownType && type != expected)
    fail("expected ", describe_type(expected), ", received ", name, " of ", describe_type(type));
  type = expected;
}

void float32_types(const Attributes&, Types& inputs, Types& outputs) {
  expect_type(inputs[0], kFloat32, "data");
  outputs[0] = kFloat32;
}

void data_types(const Attributes&, Types& inputs, Types& outputs) {
  outputs[0] = inputs[0] = data_type(inputs[0], "data");
}

void layer_types(const Attributes& attributes, Types& inputs, Types& outputs) {
  data_types(attributes, inputs, outputs);
  expect_type(inputs[1], kFloat32, "weight");
  if (inputs.size() > 2) expect_type(inputs[2], kFloat32, "bias");
}

void expect_shape(Shape& shape, const Shape& expected, const char* name) {
  bool fits = shape.empty() || shape.size() == expected.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] == expected[i] || shape[i] == kUnknownDimension;
  if (!fits) fail("expected shape ", describe(expected), ", received ", name, " of shape ", describe(shape));
  shape = expected;
}

void expect_known(const Shape& shape, const char* name) {
  if (shape.empty() || std::count(shape.begin(), shape.end(), kUnknownDimension))
    fail("the shape of ", name, " is not known");
}

void parallel_ranges(int64_t count, int64_t range, const std::function<void(int64_t, int64_t)>& run) {
  const int64_t ranges = (count + range - 1) / range;
  std::mutex mutex;
  std::exception_ptr error;  // exceptions must not leave a parallel region
#pragma omp parallel for schedule(static) if (ranges > 1)
  for (int64_t i = 0; i < ranges; ++i) {
    try {
      run(i * range, std::min(count, (i + 1) * range));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace gluon_amp
