// Brings back an evicted value: runs the recorded operations that it takes, in forward order, each once.
#pragma once

#include "governor.h"

namespace lowtide {

struct Replaying {  // as lowtide.private.replaying
  Unseen unseen;
  c10::impl::ExcludeDispatchKeyGuard no_cast{c10::autocast_dispatch_keyset};
  at::AutoDispatchBelowADInplaceOrView below;
  c10::AutoGradMode grad{c10::GradMode::is_enabled()};
};

// One replay: the nodes that it runs, and the values that they read and write.
class Replay {
 public:
  Replay(ValuePtr value, std::shared_ptr<Tape> tape, std::shared_ptr<Governor> governor)
      : value_(std::move(value)), tape_(std::move(tape)), governor_(std::move(governor)) {}
  Replay(const Replay&) = delete;
  ~Replay() {
    if (reads_) tape_->reach->ends_reading(starts_);
  }

  Tensor run() {
    while (!reads_) {
      tape_->absorb();
      collect();
      reads_ = tape_->reach->begins_reading(starts_, streams_);
    }
    std::sort(order_.begin(), order_.end());
    for (auto& [_, node] : order_) {
      for (auto& input : node->inputs) ++values_[input.get()].uses;
    }
    ++values_[value_.get()].uses;
    Replaying replaying;
    for (auto& [_, node] : order_) run(*node);
    Tensor found = values_[value_.get()].made;
    if (governor_) governor_->changed();  // what this replay has held may go
    TORCH_CHECK(found.defined(), "a replay did not produce the value asked for: please report this");
    return found;
  }

 private:
  struct Known {
    long uses = 0;  // still to come
    Tensor made;    // kept until the last of them
  };

  void collect() {
    starts_.clear();
    values_.clear();
    order_.clear();
    std::vector<Value*> wanted{value_.get()};
    ska::flat_hash_set<Node*> seen;
    while (!wanted.empty()) {
      Value* next = wanted.back();
      wanted.pop_back();
      auto [known, is_new] = values_.emplace(next, Known{});
      if (!is_new) continue;
      ValuePtr alive = ValuePtr::reclaim_copy(next);
      Tensor bytes = here(alive);
      if (!bytes.defined() && !next->node) bytes = source(*next);
      values_[next].made = bytes;
      if (bytes.defined()) {
        starts_.push_back(address_of(bytes));
        if (has_streams(bytes)) streams_.push_back(stream_of(bytes));
        continue;
      }
      Node* node = next->node.get();
      if (!seen.insert(node).second) continue;
      order_.emplace_back(node->order, node);
      for (auto& input : node->inputs) wanted.push_back(input.get());
    }
  }

  static Tensor source(Value& value) {  // one that nothing has pinned
    Tensor bytes = locked(value);
    if (!bytes.defined()) bytes = functions->here(py::cast(ValuePtr::reclaim_copy(&value))).cast<Tensor>();
    return bytes;
  }

  void run(Node& node) {
    c10::GradMode::set_enabled(node.grad);
    Tensors bases;
    for (auto& input : node.inputs) {
      bases.push_back(values_[input.get()].made);
      TORCH_CHECK(bases.back().defined(), "a replay lacks an input: please report this");
    }
    if (governor_) ++governor_->replayed;
    UnderSettings settings(*node.settings);
    if (node.call) run_again(node, bases);
    else run_in_python(node, bases);
    bases.clear();
    node.count_off();
    for (auto& input : node.inputs) {
      Known& known = values_[input.get()];
      if (--known.uses <= 0) known.made.reset();
    }
  }

  void run_again(Node& node, Tensors& bases) {
    for (auto& [place, _] : node.updated) bases[place] = own_copy(node, place, bases[place]);
    Tensors results = node.call->again(bases, governor_.get());
    for (auto& [place, made] : node.updated) keep(made, bases[place]);
    for (auto& [place, made] : node.outputs) keep(made, results[place]);
  }

  void run_in_python(Node& node, const Tensors& bases) {
    if (governor_) governor_->want(bytes_of(node));  // it may have others wait for what is overwritten
    bool overwrites = py::len(py::getattr(node.special, "written", py::tuple())) > 0;
    py::list given, sole_reader;
    for (size_t at = 0; at < bases.size(); ++at) {
      given.append(wrapped(bases[at]));
      bool sole = is_sole_reader(node, at);
      if (sole && overwrites) no_longer_reads(bases[at]);
      sole_reader.append(py::bool_(sole));
    }
    py::list made = node.special.attr("run")(given, sole_reader);
    for (auto& [place, output] : node.outputs) keep(output, made[place].cast<Tensor>());
  }

  static int64_t bytes_of(const Node& node) {
    int64_t bytes = 0;
    for (auto& [_, output] : node.outputs) {
      if (auto value = output.lock()) bytes += value->nbytes;
    }
    return bytes;
  }

  // Whether nobody else waits for the bytes of a value that a call overwrites.
  bool is_sole_reader(Node& node, size_t place) {
    Value& value = *node.inputs[place];
    bool nobody = !value.held.defined() && value.node && value.readers <= (node.waits ? 1 : 0);
    return nobody && values_[&value].uses <= 1;
  }

  // What a call may overwrite in place of a value: its bytes where nobody else waits for them, or a copy.
  Tensor own_copy(Node& node, size_t place, const Tensor& base) {
    if (is_sole_reader(node, place)) {
      node.inputs[place]->cached.reset();  // who is evicted while the call makes room starts from elsewhere
      no_longer_reads(base);
      return base;
    }
    int64_t bytes = static_cast<int64_t>(base.storage().nbytes());
    if (governor_) governor_->want(bytes);
    return at::empty({0}, base.options().dtype(at::kByte)).set_(base.storage(), 0, {bytes}, {1}).clone();
  }

  void no_longer_reads(const Tensor& base) {  // but writes there
    auto found = std::find(starts_.begin(), starts_.end(), address_of(base));
    if (found == starts_.end()) return;
    tape_->reach->ends_reading({*found});
    starts_.erase(found);
  }

  // Keeps what was written while its value has readers.
  void keep(const WeakValue& reference, const Tensor& result) {
    ValuePtr made = reference.lock();
    if (!made) return;
    if (made->readers > 0 && !made->cached.defined()) {
      keep_cached(*made, result);
      made->came_back();
      if (is_read_again_) tape_->comes_back(result, made);
      if (governor_) {
        governor_->list(tape_, made);
        governor_->changed();
      }
    }
    auto known = values_.find(made.get());
    if (known != values_.end() && known->second.uses > 0) known->second.made = result;
  }

  ValuePtr value_;  // it keeps the values that it depends on alive
  std::shared_ptr<Tape> tape_;
  std::shared_ptr<Governor> governor_;
  const bool is_read_again_ = c10::GradMode::is_enabled();  // by a graph that this backward makes
  Addresses starts_;  // of bytes: while it runs, no thread that lowtide has not met writes there
  std::vector<c10::Stream> streams_;
  bool reads_ = false;
  std::vector<std::pair<double, Node*>> order_;
  ska::flat_hash_map<Value*, Known> values_;
};

}  // namespace lowtide
