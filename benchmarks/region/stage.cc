// The time of a ResNet-50 stage (four bottleneck blocks, 512 channels, 28x28) in oneDNN 3 alone: forward and backward,
// BatchNorm fused with ReLU, blocked layouts kept from one operator to the next, weights cast and reordered once a step.
//
//   stage BATCH bf16|f32 ROUNDS  prints a line of JSON: medians in milliseconds, by kind of operator.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "dnnl.hpp"

using dnnl::memory;
using dt = memory::data_type;
using tag = memory::format_tag;
using Args = std::unordered_map<int, memory>;

namespace {

struct Step {
  std::string kind;
  dnnl::primitive primitive;
  Args args;
};

class Stage {
 public:
  Stage(int batch, dt type) : type_(type), engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
    memory x = tensor({{batch, 256, 56, 56}, type_, tag::nchw});
    for (int block = 0; block < 4; ++block) x = bottleneck(x, block == 0 ? 2 : 1, block == 0);
    gradient_ = tensor(x.get_desc());
    std::reverse(backward_builders_.begin(), backward_builders_.end());
    std::map<void*, memory> gradients{{x.get_data_handle(), gradient_}};
    gradients_ = &gradients;
    for (auto& build : backward_builders_) build();
    gradients_ = nullptr;
  }

  // Runs a step and returns milliseconds by kind of operator.
  std::map<std::string, double> run(bool apart) {
    std::map<std::string, double> times;
    const auto begin = now();
    for (auto* steps : {&forward_, &backward_}) {
      const auto start = now();
      for (auto& step : *steps) {
        const auto before = now();
        step.primitive.execute(stream_, step.args);
        if (apart) {
          stream_.wait();
          times[step.kind] += since(before);
        }
      }
      stream_.wait();
      times[steps == &forward_ ? "forward" : "backward"] = since(start);
    }
    times["step"] = since(begin);
    return times;
  }

  double weight_flops() const { return weight_flops_; }

  // Operations per second of a large product: what there is to reach.
  double ceiling() {
    const memory::dim n = 2048;
    const memory::desc md({n, n}, type_, tag::ab);
    auto pd = dnnl::matmul::primitive_desc(engine_, md, md, md);
    dnnl::matmul product(pd);
    memory a = tensor(md), b = tensor(md), c = tensor(md);
    double best = 1e9;
    for (int round = 0; round < 10; ++round) {
      const auto begin = now();
      product.execute(stream_, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}});
      stream_.wait();
      best = std::min(best, since(begin));
    }
    return 2.0 * n * n * n / (best * 1e-3);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static Clock::time_point now() { return Clock::now(); }
  static double since(Clock::time_point begin) {
    return std::chrono::duration<double, std::milli>(now() - begin).count();
  }

  memory tensor(const memory::desc& md) {
    memory made(md, engine_);
    if (md.get_data_type() == dt::f32) {
      auto* values = static_cast<float*>(made.get_data_handle());
      for (size_t i = 0; i < md.get_size() / 4; ++i) values[i] = 0.01f * static_cast<float>(i % 17) - 0.08f;
    } else {
      auto* values = static_cast<uint16_t*>(made.get_data_handle());
      for (size_t i = 0; i < md.get_size() / 2; ++i) values[i] = static_cast<uint16_t>(0x3c00 + (i % 17) * 8);
    }
    return made;
  }

  memory as(std::vector<Step>& steps, const memory& source, const memory::desc& md, const char* kind = "reorder") {
    if (source.get_desc() == md) return source;
    memory made = tensor(md);
    steps.push_back({kind, dnnl::reorder(source, made), {{DNNL_ARG_FROM, source}, {DNNL_ARG_TO, made}}});
    return made;
  }

  // Gives a tensor its gradient, or adds to the one that it has.
  void give(const memory& x, const memory& gradient) {
    auto found = gradients_->find(x.get_data_handle());
    if (found == gradients_->end()) {
      gradients_->emplace(x.get_data_handle(), gradient);
      return;
    }
    memory sum = tensor(found->second.get_desc());
    memory other = as(backward_, gradient, found->second.get_desc());
    dnnl::sum::primitive_desc pd(engine_, sum.get_desc(), {1.f, 1.f}, {found->second.get_desc(), other.get_desc()});
    backward_.push_back({"sum", dnnl::sum(pd),
                         {{DNNL_ARG_MULTIPLE_SRC, found->second}, {DNNL_ARG_MULTIPLE_SRC + 1, other}, {DNNL_ARG_DST, sum}}});
    found->second = sum;
  }

  memory convolution(const memory& x, memory::dim filters, memory::dim kernel, memory::dim stride, bool is_first) {
    const auto in = x.get_desc().get_dims();
    const memory::dim pad = kernel / 2, size = in[2] / stride;
    const memory::dims out{in[0], filters, size, size}, shape{filters, in[1], kernel, kernel};
    const memory::dims strides{stride, stride}, padding{pad, pad};
    auto any = [&](const memory::dims& dims) { return memory::desc(dims, type_, tag::any); };
    const auto algorithm = dnnl::algorithm::convolution_direct;
    dnnl::convolution_forward::primitive_desc pd(engine_, dnnl::prop_kind::forward_training, algorithm, any(in),
                                                 any(shape), any(out), strides, padding, padding);
    memory weight = tensor({shape, dt::f32, tag::oihw});  // the parameter, as MXNet keeps it
    memory source = as(forward_, x, pd.src_desc()), y = tensor(pd.dst_desc());
    memory cast = as(forward_, weight, pd.weights_desc(), "weights");
    forward_.push_back({"convolution", dnnl::convolution_forward(pd),
                        {{DNNL_ARG_SRC, source}, {DNNL_ARG_WEIGHTS, cast}, {DNNL_ARG_DST, y}}});
    backward_builders_.push_back([=] {
      const memory dy = gradients_->at(y.get_data_handle());
      dnnl::convolution_backward_weights::primitive_desc weights_pd(
          engine_, algorithm, any(in), memory::desc(shape, dt::f32, tag::any), any(out), strides, padding, padding, pd);
      memory dw = tensor(weights_pd.diff_weights_desc());
      backward_.push_back({"weight gradient", dnnl::convolution_backward_weights(weights_pd),
                           {{DNNL_ARG_SRC, as(backward_, source, weights_pd.src_desc())},
                            {DNNL_ARG_DIFF_DST, as(backward_, dy, weights_pd.diff_dst_desc())},
                            {DNNL_ARG_DIFF_WEIGHTS, dw}}});
      as(backward_, dw, weight.get_desc(), "weights");
      weight_flops_ += 2.0 * static_cast<double>(out[0] * filters * size * size * in[1] * kernel * kernel);
      if (is_first) return;
      dnnl::convolution_backward_data::primitive_desc data_pd(engine_, algorithm, any(in), any(shape), any(out),
                                                              strides, padding, padding, pd);
      memory dx = tensor(data_pd.diff_src_desc());
      backward_.push_back({"data gradient", dnnl::convolution_backward_data(data_pd),
                           {{DNNL_ARG_DIFF_DST, as(backward_, dy, data_pd.diff_dst_desc())},
                            {DNNL_ARG_WEIGHTS, as(backward_, cast, data_pd.weights_desc(), "weights")},
                            {DNNL_ARG_DIFF_SRC, dx}}});
      give(x, dx);
    });
    return y;
  }

  memory batch_norm(const memory& x, bool relu) {
    using flags = dnnl::normalization_flags;
    const auto flag = flags::use_scale | flags::use_shift | (relu ? flags::fuse_norm_relu : flags::none);
    const auto md = x.get_desc();
    dnnl::batch_normalization_forward::primitive_desc pd(engine_, dnnl::prop_kind::forward_training, md, md, 1e-5f,
                                                         flag);
    memory y = tensor(pd.dst_desc()), scale = tensor(pd.weights_desc()), shift = tensor(pd.weights_desc());
    memory mean = tensor(pd.mean_desc()), variance = tensor(pd.variance_desc()), space(pd.workspace_desc(), engine_);
    Args args{{DNNL_ARG_SRC, x}, {DNNL_ARG_SCALE, scale}, {DNNL_ARG_SHIFT, shift},
              {DNNL_ARG_MEAN, mean}, {DNNL_ARG_VARIANCE, variance}, {DNNL_ARG_DST, y}};
    if (relu) args.emplace(DNNL_ARG_WORKSPACE, space);
    forward_.push_back({"norm", dnnl::batch_normalization_forward(pd), args});
    backward_builders_.push_back([=] {
      dnnl::batch_normalization_backward::primitive_desc back(engine_, dnnl::prop_kind::backward, md, md, md, 1e-5f,
                                                              flag, pd);
      memory dx = tensor(md), dscale = tensor(pd.weights_desc()), dshift = tensor(pd.weights_desc());
      Args given{{DNNL_ARG_SRC, x}, {DNNL_ARG_SCALE, scale}, {DNNL_ARG_MEAN, mean}, {DNNL_ARG_VARIANCE, variance},
                 {DNNL_ARG_DIFF_DST, as(backward_, gradients_->at(y.get_data_handle()), md)},
                 {DNNL_ARG_DIFF_SRC, dx}, {DNNL_ARG_DIFF_SCALE, dscale}, {DNNL_ARG_DIFF_SHIFT, dshift}};
      if (relu) given.emplace(DNNL_ARG_WORKSPACE, space);
      backward_.push_back({"norm", dnnl::batch_normalization_backward(back), given});
      give(x, dx);
    });
    return y;
  }

  memory add_relu(const memory& a, const memory& b) {
    const auto md = a.get_desc();
    memory other = as(forward_, b, md), y = tensor(md);
    dnnl::post_ops relu;
    relu.append_eltwise(dnnl::algorithm::eltwise_relu, 0.f, 0.f);
    dnnl::primitive_attr attr;
    attr.set_post_ops(relu);
    dnnl::binary::primitive_desc pd(engine_, dnnl::algorithm::binary_add, md, md, md, attr);
    forward_.push_back({"sum", dnnl::binary(pd), {{DNNL_ARG_SRC_0, a}, {DNNL_ARG_SRC_1, other}, {DNNL_ARG_DST, y}}});
    backward_builders_.push_back([=] {
      const auto algorithm = dnnl::algorithm::eltwise_relu_use_dst_for_bwd;
      dnnl::eltwise_forward::primitive_desc hint(engine_, dnnl::prop_kind::forward_training, algorithm, md, md, 0.f);
      dnnl::eltwise_backward::primitive_desc back(engine_, algorithm, md, md, md, 0.f, hint);
      memory dx = tensor(md);
      backward_.push_back({"sum", dnnl::eltwise_backward(back),
                           {{DNNL_ARG_DST, y}, {DNNL_ARG_DIFF_DST, as(backward_, gradients_->at(y.get_data_handle()), md)},
                            {DNNL_ARG_DIFF_SRC, dx}}});
      give(a, dx);
      give(b, dx);
    });
    return y;
  }

  memory bottleneck(const memory& x, int stride, bool is_first) {
    memory y = batch_norm(convolution(x, 128, 1, stride, is_first), true);
    y = batch_norm(convolution(y, 128, 3, 1, false), true);
    y = batch_norm(convolution(y, 512, 1, 1, false), false);
    memory shortcut = is_first ? batch_norm(convolution(x, 512, 1, stride, true), false) : x;
    return add_relu(y, shortcut);
  }

  dt type_;
  dnnl::engine engine_;
  dnnl::stream stream_;
  memory gradient_;
  std::vector<Step> forward_, backward_;
  std::vector<std::function<void()>> backward_builders_;
  std::map<void*, memory>* gradients_ = nullptr;
  double weight_flops_ = 0;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: stage BATCH bf16|f32 ROUNDS\n");
    return 2;
  }
  Stage stage(std::atoi(arguments[1]), std::string(arguments[2]) == "bf16" ? dt::bf16 : dt::f32);
  std::map<std::string, std::vector<double>> whole, apart;
  for (int round = -2; round < std::atoi(arguments[3]); ++round) {
    auto times = stage.run(false), kinds = stage.run(true);
    if (round < 0) continue;
    for (auto& [kind, time] : times) whole[kind].push_back(time);
    for (auto& [kind, time] : kinds)
      if (!whole.count(kind)) apart[kind].push_back(time);
  }
  std::printf("{");
  for (auto& [kind, times] : whole) std::printf("\"%s\": %.3f, ", kind.c_str(), median(times));
  for (auto& [kind, times] : apart) std::printf("\"%s\": %.3f, ", kind.c_str(), median(times));
  std::printf("\"ceiling_gflops\": %.1f, \"weight_gradient_gflops\": %.1f}\n", stage.ceiling() / 1e9,
              stage.weight_flops() / (median(apart["weight gradient"]) * 1e6));
}
